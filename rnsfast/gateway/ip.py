"""Which IP packets go through a tunnel: headers, lengths, addresses.  docs/tun.md, Gateway mode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Network, IPv6Network
from typing import Final

from rnsfast.gateway.lost import Lost
from rnsfast.gateway.messages import Address

Network = IPv4Network | IPv6Network

MEMORY: Final = 4096  # addresses whose verdict is kept, and pairs of them; then it begins anew
PLAIN: Final = 0x45  # first byte: IPv4 without options
IPV4_HEADER: Final = 20  # bytes
IPV6_HEADER: Final = 40  # bytes
MULTICAST_4: Final = 0xE0  # first byte: 224.0.0.0/4, and 240.0.0.0/4 with the broadcast address above
MULTICAST_6: Final = 0xFF  # first byte


class Allowed:
    """The addresses that one end of a tunnel may send from."""

    def __init__(self, networks: Iterable[Network]) -> None:
        self.networks = tuple(dict.fromkeys(networks))
        self._ranges = [(n.version, int(n.netmask), int(n.network_address)) for n in self.networks]
        self._known: dict[bytes, bool] = {}  # at most MEMORY

    def __contains__(self, raw: bytes) -> bool:
        known = self._known.get(raw)
        return self._look(raw) if known is None else known

    def _look(self, raw: bytes) -> bool:
        number, version = int.from_bytes(raw, "big"), 4 if len(raw) == 4 else 6
        found = any(version == of and number & mask == net for of, mask, net in self._ranges)
        if len(self._known) >= MEMORY:
            self._known.clear()
        self._known[raw] = found
        return found


def whole(packet: bytes) -> bytes | None:
    """The packet without what stands behind it; None if its header cannot be right or part of it is missing."""
    size = len(packet)
    if size >= IPV4_HEADER and packet[0] >> 4 == 4:
        total = packet[2] << 8 | packet[3]
        if total == size and packet[0] & 15 >= 5 and (packet[0] & 15) * 4 <= size:
            return packet
        if total > size or total < (packet[0] & 15) * 4 or packet[0] & 15 < 5:
            return None
        return packet[:total]
    if size >= IPV6_HEADER and packet[0] >> 4 == 6:
        total = IPV6_HEADER + (packet[4] << 8 | packet[5])
        if total == size:
            return packet
        return packet[:total] if total < size else None
    return None


def remember(pair: bytes, pairs: set[bytes]) -> None:
    """Add to a set of at most MEMORY."""
    if len(pairs) >= MEMORY:
        pairs.clear()
    pairs.add(pair)


class Gate:
    """Checks packets in batches, each direction by its own rules, and counts what it refuses in `lost`.

    Args:
        own: the tunnel addresses of this end.
        routes: further networks behind the peer.
    """

    def __init__(self, own: Sequence[Address], routes: Iterable[Network], lost: Counter[Lost]) -> None:
        routes = tuple(routes)
        self.lost = lost
        self.allowed = Allowed([*(address.network for address in own), *routes])
        #: Multicast passes if somebody asked for it by a route.
        self._asked = Allowed(n for n in routes if n.is_multicast or n.network_address.packed[0] >= MULTICAST_4)
        self._own = frozenset(address.ip.packed for address in own)
        self._broadcasts = frozenset(
            a.network.broadcast_address.packed for a in own if a.version == 4 and a.network.prefixlen < 31
        )
        # IPv4 sources with destinations that passed, at most MEMORY each: nothing but these decides, so they pass again
        self._out_pairs: set[bytes] = set()
        self._in_pairs: set[bytes] = set()

    def leaving(self, packets: Iterable[bytes], limit: int, too_big: list[bytes]) -> list[bytes]:
        """From the device: what may go. Packets beyond `limit` bytes are counted and added to `too_big`."""
        lost, good, pairs = self.lost, [], self._out_pairs
        for packet in packets:
            size = len(packet)
            if (
                IPV4_HEADER <= size <= limit
                and packet[0] == PLAIN
                and packet[2] << 8 | packet[3] == size
                and packet[12:20] in pairs
            ):  # 64 packets in 8 us; with the questions below in 18
                good.append(packet)
                continue
            sound = whole(packet)
            if sound is None:
                lost[Lost.OUT_HEADER] += 1
                continue
            old = sound[0] >> 4 == 4
            refusal = self._leaving_4(sound) if old else self._leaving_6(sound)
            if refusal is not None:
                lost[refusal] += 1
            elif len(sound) > limit:
                lost[Lost.OUT_TOO_BIG] += 1
                too_big.append(sound)
            else:
                good.append(sound)
                if old:
                    remember(sound[12:20], pairs)
        return good

    def arriving(self, packets: Iterable[bytes]) -> list[bytes]:
        """From the link: what may go into the device."""
        lost, good, pairs = self.lost, [], self._in_pairs
        allowed, own = self.allowed, self._own
        for packet in packets:
            size = len(packet)
            if (
                size >= IPV4_HEADER
                and packet[0] == PLAIN
                and packet[2] << 8 | packet[3] == size
                and packet[12:20] in pairs
            ):
                good.append(packet)
                continue
            sound = whole(packet)
            if sound is None:
                lost[Lost.IN_HEADER] += 1
                continue
            old = sound[0] >> 4 == 4
            source = sound[12:16] if old else sound[8:24]
            if source not in allowed or source in own:
                link_local = not old and source[:1] == b"\xfe" and source[1] & 0xC0 == 0x80
                lost[Lost.IN_LINK_LOCAL if link_local else Lost.IN_SOURCE] += 1
            elif self._is_multicast(sound[16:20] if old else sound[24:40]):
                lost[Lost.IN_MULTICAST] += 1
            else:
                good.append(sound)
                if old:
                    remember(sound[12:20], pairs)
        return good

    def _is_multicast(self, destination: bytes) -> bool:
        """Multicast or broadcast that nobody asked for."""
        if len(destination) == 4:
            if destination[0] < MULTICAST_4:
                return destination in self._broadcasts
        elif destination[0] != MULTICAST_6:
            return False
        return destination not in self._asked

    def _leaving_4(self, packet: bytes) -> Lost | None:
        if packet[12] >= MULTICAST_4 or packet[12] == 0:
            return Lost.OUT_SOURCE
        return Lost.OUT_MULTICAST if self._is_multicast(packet[16:20]) else None

    def _leaving_6(self, packet: bytes) -> Lost | None:
        link_local = (packet[8] == 0xFE and packet[9] & 0xC0 == 0x80) or not any(packet[8:24])
        if self._is_multicast(packet[24:40]):
            return Lost.OUT_LINK_LOCAL if link_local or packet[25] & 15 <= 2 else Lost.OUT_MULTICAST
        if link_local and packet[8:24] not in self.allowed:
            return Lost.OUT_LINK_LOCAL
        return Lost.OUT_SOURCE if packet[8] == MULTICAST_6 else None
