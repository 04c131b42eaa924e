"""The data plane: packets for others go on without a second thought.  Protocol 02, sections 5.1 to 5.3, 5.6 and 12.2.

Tables in, batches in, batches out. The tables are plain dictionaries by 16-byte hash, kept by the control plane; what
needs thought (announces, path requests, link requests and their proofs, whatever is for this node) is returned to the
caller in order. Nothing is allocated for a packet but the packet that goes out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rnsfast.crypto.hashes import full
from rnsfast.engine.linktable import LinkTable
from rnsfast.engine.port import Local
from rnsfast.wire.drop import Drop
from rnsfast.wire.packet import (
    ANNOUNCE,
    CTX_CACHE_REQUEST,
    CTX_CHANNEL,
    CTX_KEEPALIVE,
    CTX_LRPROOF,
    CTX_RESOURCE,
    CTX_RESOURCE_PRF,
    CTX_RESOURCE_REQ,
    DATA,
    LINKREQUEST,
    PROOF,
    SINGLE,
)

if TYPE_CHECKING:
    from rnsfast.engine.engine import Engine
    from rnsfast.engine.port import Port

REVERSE_LIFETIME: Final = 480.0  # seconds for which the way back of a packet is remembered at least
REVERSE_GENERATION: Final = 65_536  # packets; two generations are kept

#: Contexts without duplicate check (protocol 02, 3.3).
UNFILTERED: Final = frozenset(
    (CTX_KEEPALIVE, CTX_RESOURCE, CTX_RESOURCE_REQ, CTX_RESOURCE_PRF, CTX_CACHE_REQUEST, CTX_CHANNEL)
)

#: What needs thought even when it is addressed to this node as the next hop.
CONTROL: Final = frozenset((ANNOUNCE, LINKREQUEST))

_BYTE: Final = [bytes((n,)) for n in range(256)]
_LAST_HOPS: Final = 127  # wire hops of a packet that would leave with more than any receiver takes


class ReverseTable:
    """Truncated packet hash to (where it came from, where it went): the way back of its proof."""

    __slots__ = ("_began", "_current", "_previous")

    def __init__(self) -> None:
        self._current: dict[bytes, tuple[Port, Port]] = {}
        self._previous: dict[bytes, tuple[Port, Port]] = {}
        self._began = 0.0

    def put(self, key: bytes, source: Port, out: Port, now: float) -> None:
        """Remember."""
        if len(self._current) >= REVERSE_GENERATION or now - self._began > REVERSE_LIFETIME:
            self._turn(now)
        self._current[key] = (source, out)

    def _turn(self, now: float) -> None:
        self._previous = self._current if now - self._began <= 2 * REVERSE_LIFETIME else {}
        self._current = {}
        self._began = now

    def __contains__(self, key: bytes) -> bool:
        return key in self._current or key in self._previous

    def __len__(self) -> int:
        return len(self._current) + len(self._previous)

    def get(self, key: bytes) -> tuple[Port, Port] | None:
        """Look up. None if there is no way back: the interface is down, or gone."""
        ways = self._current.get(key) or self._previous.get(key)
        return ways if ways is not None and ways[0].online else None

    def forget(self, key: bytes) -> None:
        """One proof has gone back, whatever it is worth."""
        if self._current.pop(key, None) is None:
            self._previous.pop(key, None)

    def items(self) -> list[tuple[bytes, tuple[Port, Port]]]:
        """For looking: those whose interfaces are both there."""
        entries = (*self._previous.items(), *self._current.items())
        return [(key, ways) for key, ways in entries if ways[0].online and ways[1].online]


class Relay:
    """Forwards batches. `forwarded` counts packets."""

    def __init__(self, engine: Engine, links: LinkTable) -> None:
        self._engine = engine
        self._links = links
        self.reverse = ReverseTable()
        self.forwarded = 0

    def forward(self, port: Port, packets: list[bytes], now: float) -> list[bytes]:
        """Send on what is for others. Returns the rest, in order."""
        engine = self._engine
        proved, unproved = self._links.proved, self._links.unproved
        own, paths, destinations = engine.transport_id, engine.paths.paths, engine.destinations
        reverse, seen, drops = self.reverse, engine.seen, port.drops
        unfiltered, byte, hop = UNFILTERED, _BYTE, port.hop
        transport = engine.transport
        assert transport is not None
        locals_only = not (transport.carries or port.local is Local.CLIENT)  # only what is for a program behind us
        keep_header = engine.local_hops_delta == 0
        clients = transport.clients
        unix_time = now + engine.unix_offset
        rest: list[bytes] = []
        outs: dict[Port, list[bytes]] = {}
        for raw in packets:
            if len(raw) < 20 or raw[1] >= _LAST_HOPS:
                rest.append(raw)
                continue
            flags, hops = raw[0], raw[1] + hop
            if flags & 0xCC == 0x0C:  # on a link
                entry = proved.get(raw[2:18])
                context = raw[18]
                if entry is None:
                    if raw[2:18] in unproved and context != CTX_LRPROOF:
                        drops[Drop.LINK_UNPROVED] += 1
                    else:
                        rest.append(raw)
                    continue
                kind = flags & 3
                if kind in CONTROL or (context == CTX_LRPROOF and kind == PROOF):
                    rest.append(raw)
                    continue
                back, on = entry.previous_port, entry.next_port
                if on is back:
                    if port is not on or hops not in (entry.remaining, entry.taken):
                        drops[Drop.LINK_HOPS] += 1
                        continue
                    out = port
                elif port is back and hops == entry.taken:
                    out = on
                elif port is on and hops == entry.remaining:
                    out = back
                else:
                    drops[Drop.LINK_HOPS] += 1
                    continue
                if context not in unfiltered and not seen.add(full(byte[flags & 0x0F] + raw[2:])):
                    drops[Drop.FILTERED] += 1
                    continue
                entry.used_at = now
                sent = byte[flags] + byte[hops] + raw[2:]
            elif flags & 0xC0 == 0x40:  # in transport
                kind = flags & 3
                if raw[2:18] != own or kind in CONTROL or flags & 0x0C or len(raw) < 36:
                    rest.append(raw)
                    continue
                destination = raw[18:34]
                path = paths.get(destination)
                if path is None or (destination, SINGLE) in destinations or (locals_only and path.hops):
                    rest.append(raw)
                    continue
                digest = full(byte[flags & 0x0F] + raw[18:])
                if raw[34] not in unfiltered and not seen.add(digest):
                    drops[Drop.FILTERED] += 1
                    continue
                out = path.port
                if not out.online:
                    drops[Drop.NO_PATH] += 1
                    transport.no_way(destination, port, now)
                    continue
                if path.hops > 1:
                    sent = byte[flags] + byte[hops] + path.next_hop + raw[18:]
                elif path.hops or not keep_header:
                    sent = byte[flags & 0x0F] + byte[hops] + raw[18:]
                else:
                    sent = byte[flags] + byte[hops] + raw[2:]
                path.heard_at = unix_time
                reverse.put(digest[:16], port, out, now)
            elif flags & 0xCF == PROOF and (ways := reverse.get(raw[2:18])) is not None:  # of what went this way
                if ways[1] is not port:  # forged, or overheard: the entry waits for the right one (trap T7)
                    drops[Drop.PROOF_UNEXPECTED] += 1
                    continue
                if not seen.add(full(byte[flags & 0x0F] + raw[2:])):
                    drops[Drop.FILTERED] += 1
                    continue
                reverse.forget(raw[2:18])
                out = ways[0]
                sent = byte[flags] + byte[hops] + raw[2:]
            elif (  # straight to a program behind us
                clients
                and flags & 0xCF == DATA
                and (path := paths.get(raw[2:18])) is not None
                and path.hops == 0
                and path.port.online
                and (raw[2:18], SINGLE) not in destinations
            ):
                digest = full(byte[flags & 0x0F] + raw[2:])
                if raw[18] not in unfiltered and not seen.add(digest):
                    drops[Drop.FILTERED] += 1
                    continue
                out = path.port
                sent = byte[flags] + byte[hops] + raw[2:]
                path.heard_at = unix_time
                reverse.put(digest[:16], port, out, now)
            else:
                rest.append(raw)
                continue
            if len(sent) > out.hw_mtu:
                drops[Drop.TX_TOO_LARGE] += 1
            elif out in outs:
                outs[out].append(sent)
            else:
                outs[out] = [sent]
        for out, group in outs.items():
            self.forwarded += len(group)
            out.send_many(group)
        return rest
