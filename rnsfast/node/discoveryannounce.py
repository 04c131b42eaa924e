"""Tells the network of interfaces that others may connect to.  Protocol 02, sections 15.1 to 15.3.

A minute after the start, and then at most once a minute, the interface whose announce is most overdue is announced.
Searching the stamp, and asking the operator's programs, happens on a callback thread.
"""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Final

from rnsfast.crypto.identity import Identity
from rnsfast.crypto.stamp import find_stamp, work_block
from rnsfast.interfaces.base import Handle
from rnsfast.interfaces.discovery import Published
from rnsfast.node.managementwork import Work
from rnsfast.wire.discovery import (
    ENCRYPTED,
    REQUIRED,
    Offer,
    build_info,
    clean_name,
    info_hash,
    is_host_name,
    is_ip_address,
)

log = logging.getLogger(__name__)

ROUND: Final = 60.0  # seconds between announces, of whichever interface (protocol 02, 15.3)
RETRY: Final = 300.0  # seconds after which one that could not be made is tried again
STAMPS_KEPT: Final = 64  # an interface needs one as long as nothing about it changes
IMPLEMENTATION: Final = "rnsfast"


class NotNow(Exception):
    """An interface cannot be announced this time; the message says why."""


class Announcer:
    """Announces discoverable interfaces in turn. Everything but `start` and `wake` runs as errands of `work`."""

    def __init__(
        self,
        work: Work,
        interfaces: Callable[[], list[Published]],
        announce: Callable[[bytes], bool],
        *,
        transport_id: bytes,
        transport: bool,
        network: Identity | None,
        version: str,
    ) -> None:
        self._work, self._interfaces, self._announce = work, interfaces, announce
        self._transport_id, self._transport, self._network = transport_id, transport, network
        self._version = version
        self._round_at = work.now() + ROUND
        self._due: dict[object, float] = {}  # by interface; one that is not here is due
        self._unsent: set[object] = set()  # were ready when no interface was up
        self._stamps: dict[bytes, bytes] = {}  # by info hash and cost; at most STAMPS_KEPT
        self._said: dict[object, str] = {}  # why an interface could not be announced; said once
        self._call: Handle | None = None

    def start(self) -> None:
        """Make plans."""
        self._work.run(self._plan)

    def wake(self) -> None:
        """An interface was added, or came up. Any thread."""
        self._work.run(self._woken)

    @property
    def is_waiting(self) -> bool:
        """Whether something is ready and no interface was up to send it. Any thread."""
        return bool(self._unsent)

    def _woken(self) -> None:
        for interface in self._unsent:
            self._due.pop(interface, None)
        self._unsent.clear()
        self._plan()

    def _plan(self) -> None:
        """Set the deadline of the next round; none if there is nothing to announce."""
        if self._call is not None:
            self._call.cancel()
            self._call = None
        earliest = min((self._due.get(one.interface, -inf) for one in self._interfaces()), default=inf)
        if earliest < inf:
            self._call = self._work.run_at(max(self._round_at, earliest), self._round)

    def _round(self) -> None:
        now = self._work.now()
        self._round_at = now + ROUND
        published = self._interfaces()
        present = {one.interface for one in published}
        self._due = {interface: due for interface, due in self._due.items() if interface in present}
        due = [one for one in published if self._due.get(one.interface, -inf) <= now]
        if due:
            chosen = min(due, key=lambda one: self._due.get(one.interface, -inf))
            self._due[chosen.interface] = now + self._announce_one(chosen)
        self._plan()

    def _announce_one(self, one: Published) -> float:
        """Announce an interface. Returns in how many seconds to do so again; infinity: when an interface comes up."""
        try:
            app_data = self._app_data(one)
            sent = self._announce(app_data)
        except (NotNow, ValueError) as error:
            if self._work.stopping.is_set():
                return inf
            if self._said.get(one.interface) != str(error):
                self._said[one.interface] = str(error)
                log.warning("[[%s]] is not announced to others: %s", one.interface.name, error)
            return RETRY
        self._said.pop(one.interface, None)
        if sent:
            log.info("[[%s]] is announced to others", one.interface.name)
            return one.options.announce_interval
        self._unsent.add(one.interface)
        return inf

    # ------------------------------------------------------------------ what is said

    def _app_data(self, one: Published) -> bytes:
        options, network = one.options, self._network
        if options.encrypt and network is None:
            raise NotNow("discovery_encrypt needs a network_identity")
        packed = build_info(self._offer(one))
        payload = packed + self._stamp(packed, options.stamp_cost)
        if not options.encrypt or network is None:
            return b"\x00" + payload
        return bytes((ENCRYPTED,)) + network.encrypt(payload)

    def _offer(self, one: Published) -> Offer:
        options = one.options
        latitude, longitude, height = options.latitude, options.longitude, options.height
        if options.location_program is not None:
            latitude, longitude, height = self._location(options.location_program)
        reachable = self._reachable_on(one) if "reachable_on" in REQUIRED[one.kind] else None
        offer = Offer(
            kind=one.kind,
            transport=self._transport,
            transport_id=self._transport_id,
            name=clean_name(options.name),
            implementation=IMPLEMENTATION,
            version=self._version,
            latitude=latitude,
            longitude=longitude,
            height=height,
            reachable_on=reachable,
            port=one.port,
            network_name=options.network_name,
            passphrase=options.passphrase,
            frequency=options.frequency,
            bandwidth=options.bandwidth,
            modulation=options.modulation,
            operator=options.operator,
        )
        missing = [field for field in REQUIRED[one.kind] if getattr(offer, field) is None]
        if missing:
            raise NotNow(f"a {one.kind} is announced with its {' and '.join(missing)}, which the section does not give")
        return offer

    def _reachable_on(self, one: Published) -> str:
        """The address or name others connect to; a program is asked for it."""
        text = one.options.reachable_on
        if text is None:
            raise NotNow("reachable_on is not set: the address or host name at which others reach it")
        program = Path(text).expanduser()
        if os.name == "posix" and program.is_file() and os.access(program, os.X_OK):
            text = self._ask([str(program)], "reachable_on")
        if not is_ip_address(text) and not is_host_name(text):
            raise NotNow(f"reachable_on: {text[:64]!r} is neither an address nor a host name")
        return text

    def _location(self, command: str) -> tuple[float, float, float]:
        """What `location_cmd` prints: latitude, longitude and height."""
        if os.name != "posix":
            raise NotNow("location_cmd is not available on this system")
        words = shlex.split(command)
        line = self._ask([os.path.expanduser(words[0]), *words[1:]] if words else [""], "location_cmd")
        try:
            latitude, longitude, height = (float(part) for part in line.split(","))
        except ValueError:
            raise NotNow(f"location_cmd printed {line[:64]!r}, expected is 'latitude, longitude, height'") from None
        return latitude, longitude, height

    def _ask(self, command: list[str], option: str) -> str:
        try:
            return self._work.run_program(command)
        except OSError as error:
            raise NotNow(f"{option}: {error}") from error

    def _stamp(self, packed: bytes, cost: int) -> bytes:
        subject = info_hash(packed)
        key = subject + bytes((cost,))
        stamp = self._stamps.get(key)
        if stamp is None:
            stamp = find_stamp(work_block(subject), cost, is_cancelled=self._work.stopping.is_set)
            if stamp is None:
                raise NotNow("the search for a stamp was ended")
            if len(self._stamps) >= STAMPS_KEPT:
                del self._stamps[next(iter(self._stamps))]
            self._stamps[key] = stamp
        return stamp
