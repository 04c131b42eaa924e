"""Destinations: addresses that receive (IN) or are sent to (OUT).  Protocol 01, sections 3, 6 and 7."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Final

from rnsfast.crypto.entropy import Entropy
from rnsfast.crypto.hashes import short
from rnsfast.crypto.identity import Identity
from rnsfast.crypto.token import TokenKey
from rnsfast.crypto.x25519 import X25519Key
from rnsfast.engine.requests import RequestHandlers
from rnsfast.wire.names import destination_hash, full_name, name_hash
from rnsfast.wire.packet import GROUP, LINK, PLAIN, SINGLE

RATCHET_INTERVAL: Final = 1800.0  # seconds between rotations; local
RATCHETS_KEPT: Final = 512  # private keys, oldest dropped; local
UNDECRYPTABLE_LIMIT: Final = 64  # failed openings a second and ratcheted destination; beyond, dropped unopened


class Direction(IntEnum):
    """API values, never on the wire."""

    IN = 0x11
    OUT = 0x12


class ProofStrategy(IntEnum):
    """API values, never on the wire. What is proved of packets received."""

    NONE = 0x21
    APP = 0x22
    ALL = 0x23


class RatchetRing:
    """The private ratchet keys of a destination of ours, newest first."""

    def __init__(self, keys: list[bytes] | None = None, interval: float = RATCHET_INTERVAL, kept: int = RATCHETS_KEPT):
        self.keys = keys or []
        self.interval = interval
        self.kept = kept
        self.rotated_at = 0.0  # unix time; not stored, so the first announce of each run rotates

    def rotate(self, unix_time: float, entropy: Entropy) -> bool:
        """A new key in front if the newest is old enough. Called when announcing only.  Protocol 01, section 7.1."""
        if not unix_time > self.rotated_at + self.interval:
            return False
        self.keys.insert(0, entropy(32))
        del self.keys[self.kept :]
        self.rotated_at = unix_time
        return True

    @property
    def public(self) -> bytes | None:
        """The newest public key, None if there is none yet."""
        return X25519Key(self.keys[0]).public if self.keys else None


def ratchet_id(public: bytes) -> bytes:
    """The 10-byte id of a ratchet, for display."""
    return short(public)


class Destination:
    """One address. `kind` is SINGLE, GROUP or PLAIN.

    ValueError: a PLAIN destination with an identity, another without one (IN makes its own), an unknown kind.
    """

    def __init__(self, identity: Identity | None, direction: Direction, kind: int, app: str, *aspects: str) -> None:
        if kind not in (SINGLE, GROUP, PLAIN):
            word = "LINK destinations are made by the engine" if kind == LINK else f"there is no kind {kind}"
            raise ValueError(f"destination {full_name(app, *aspects)}: {word}; use SINGLE, GROUP or PLAIN")
        if kind == PLAIN and identity is not None:
            raise ValueError(f"PLAIN destination {full_name(app, *aspects)} cannot have an identity")
        if kind != PLAIN and identity is None:
            if direction is not Direction.IN:
                raise ValueError(f"OUT destination {full_name(app, *aspects)} needs the identity it belongs to")
            identity = Identity()
            aspects = (*aspects, identity.hash.hex())
        self.identity = identity
        self.direction = Direction(direction)
        self.kind = kind
        self.name = full_name(app, *aspects)
        self.name_hash = name_hash(app, *aspects)  # 10 bytes
        self.hash = destination_hash(self.name_hash, None if identity is None else identity.hash)  # 16 bytes
        self.proofs = ProofStrategy.NONE
        self.accepts_links = True
        self.app_data: bytes | None = None  # announced unless an announce brings its own
        self.ratchets: RatchetRing | None = None
        self.enforce_ratchets = False
        self.last_emission = 0  # unix seconds of the last announce
        self.group_key: TokenKey | None = None
        self.requests = RequestHandlers()  # also of an OUT destination: an initiator may be asked, too
        self.owner: Any = None  # the facade, for the runtime
        self._failures: list[float] = []

    def set_group_key(self, key: bytes, entropy: Entropy) -> None:
        """The shared key of a GROUP destination: 64 or 32 bytes, exchanged out of band."""
        if self.kind != GROUP:
            raise ValueError(f"{self.name} is not a GROUP destination, it has no shared key")
        self.group_key = TokenKey(key, entropy)

    def seal(self, plain: bytes, ratchet: bytes | None, entropy: Entropy) -> bytes:
        """What goes on the wire for `plain`. ValueError for a GROUP destination without its key."""
        if self.kind == PLAIN:
            return plain
        if self.kind == GROUP:
            if self.group_key is None:
                raise ValueError(f"GROUP destination {self.name} has no key yet: set_group_key first")
            return self.group_key.seal(plain)
        assert self.identity is not None
        return self.identity.encrypt(plain, ratchet, entropy)

    def open(self, data: bytes, now: float) -> tuple[bytes, bytes | None] | None:
        """(plaintext, ratchet id or None), None if it cannot be opened.

        A ratcheted destination tries many keys for a packet it cannot open; after UNDECRYPTABLE_LIMIT of those within
        a second, further packets only get the newest few ratchets until the second is over.
        """
        if self.kind == PLAIN:
            return data, None
        if self.kind == GROUP:
            opened = None if self.group_key is None else self.group_key.open(data)
            return None if opened is None else (opened, None)
        if self.identity is None or not self.identity.has_private:
            return None
        keys = self.ratchets.keys if self.ratchets is not None else []
        if len(keys) > 4 and len(self._failures) >= UNDECRYPTABLE_LIMIT:
            if self._failures[0] > now - 1.0:
                keys = keys[:4]
            else:
                self._failures.clear()
        result = self.identity.decrypt(data, keys, self.enforce_ratchets)
        if result is None:
            if len(self._failures) < UNDECRYPTABLE_LIMIT:
                self._failures.append(now)
        return result

    def __repr__(self) -> str:
        return f"<{self.name} {self.hash.hex()}>"
