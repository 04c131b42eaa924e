"""Links that others open, until it is known who they are.  docs/tun.md, Access."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection
from math import inf
from typing import Final

from rnsfast.crypto.identity import Identity
from rnsfast.gateway.lost import Lost
from rnsfast.node.link import Link
from rnsfast.wire.names import destination_hash, name_hash

log = logging.getLogger(__name__)

APP, ASPECT = "rnsfast", "tun"
NAME: Final = name_hash(APP, ASPECT)
MAX_ARRIVING: Final = 16  # links whose initiator has not said who it is; further ones are closed
IDENTIFY_WITHIN: Final = 15.0  # seconds
LOG_PAUSE: Final = 60.0  # seconds between two lines about the same address
LOGGED: Final = 256  # addresses for which that is remembered


def tunnel_hash(identity: Identity) -> bytes:
    """The address of the tunnel end that has this identity, 16 bytes."""
    return destination_hash(NAME, identity.hash)


class Door:
    """Lets in who is allowed. On the reactor thread.

    Args:
        allowed: tunnel addresses.
        let_in: called with a link and the tunnel address of its initiator.
    """

    def __init__(self, allowed: Collection[bytes], lost: Counter[Lost], let_in: Callable[[Link, bytes], None]) -> None:
        self._allowed, self._lost, self._let_in = frozenset(allowed), lost, let_in
        self._arriving: dict[Link, float] = {}  # since when; at most MAX_ARRIVING
        self._logged: dict[bytes, float] = {}  # at most LOGGED

    @property
    def links(self) -> tuple[Link, ...]:
        """Those that are waiting."""
        return tuple(self._arriving)

    def arrive(self, link: Link, now: float) -> None:
        """A link to our destination."""
        if len(self._arriving) >= MAX_ARRIVING:
            self._lost[Lost.LINK_TOO_MANY] += 1
            link.close()
        else:
            self._arriving[link] = now

    def judge(self, now: float) -> float:
        """Let in, or close, whoever has said who it is. Returns when to look again."""
        due = inf
        for link, since in list(self._arriving.items()):
            identity = link.remote_identity
            if identity is not None:
                del self._arriving[link]
                self._decide(link, tunnel_hash(identity), now)
            elif not link._engine.is_open:
                del self._arriving[link]
            elif now >= since + IDENTIFY_WITHIN:
                del self._arriving[link]
                self._lost[Lost.LINK_UNIDENTIFIED] += 1
                link.close()
            else:
                due = min(due, since + IDENTIFY_WITHIN)
        return due

    def _decide(self, link: Link, remote: bytes, now: float) -> None:
        if remote in self._allowed:
            self._let_in(link, remote)
        else:
            self._lost[Lost.LINK_NOT_ALLOWED] += 1
            self.log(remote, now, "link from %s refused: it is not allowed to use this tunnel")
            link.close()

    def log(self, remote: bytes, now: float, sentence: str) -> None:
        """Warn, at most once a minute about the same address."""
        if now - self._logged.get(remote, -inf) >= LOG_PAUSE:
            self._logged.pop(remote, None)
            if len(self._logged) >= LOGGED:
                del self._logged[next(iter(self._logged))]
            self._logged[remote] = now
            log.warning(sentence, remote.hex())

    def close(self) -> None:
        """Nobody comes in any more."""
        for link in self._arriving:
            link.close()
        self._arriving.clear()
