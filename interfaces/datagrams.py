"""UDP over IP as bytes: what a host behind a TUN device sends, and what it makes of what arrives.

    IPv4    0 version and header size, 2 total size, 4 identifier, 6 flags and fragment offset, 8 hop limit, 9 protocol,
            10 checksum, 12 source, 16 destination, 20 options
    IPv6    0 version, class and flow, 4 payload size, 6 next header, 7 hop limit, 8 source, 24 destination, 40 payload
    UDP     0 source port, 2 destination port, 4 size, 6 checksum, 8 payload

Sent datagrams are never fragmented and may not be (DF), so their identifier is 0 (RFC 6864). Received fragments are not
put together. Pure functions; whole batches; what is wrong with a datagram is a Drop.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address
from typing import Final

from rnsfast.osio.checksum import complement, udp_complement, word_sum
from rnsfast.wire.drop import Drop

UDP: Final = 17
ICMP: Final = {4: 1, 6: 58}  # by IP version
HEADERS: Final = {4: 28, 6: 48}  # bytes of the IP and UDP headers
HOP_LIMIT: Final = 64

_HEAD4: Final = struct.Struct(">2sH6sH12sHH")
_HEAD6: Final = struct.Struct(">4sH38sHH")
_DONT_FRAGMENT: Final = 0x40
_MORE_OR_OFFSET: Final = 0x3FFF  # flag and offset of fragments
_FRAGMENT: Final = 44  # next header of IPv6

_ECHO: Final = {4: (8, 0), 6: (128, 129)}  # ICMP types of request and answer
_UNREACHABLE: Final = {4: 3, 6: 1}
_TOO_BIG6: Final = 2
_FRAGMENTATION_NEEDED: Final = 4  # code under type 3 of IPv4

Address = IPv4Address | IPv6Address


class Flow:
    """The datagrams from one address and port to another. Everything but sizes and checksums is prepared once."""

    __slots__ = ("_build", "_fixed", "_ip_sum", "_udp_sum", "destination", "overhead")

    def __init__(self, source: Address, source_port: int, destination: Address, destination_port: int) -> None:
        if source.version != destination.version:
            raise ValueError(f"{source} and {destination} are not of one family")
        self.destination = destination
        self.overhead = HEADERS[source.version]
        ports = struct.pack(">HH", source_port, destination_port)
        addresses = source.packed + destination.packed
        self._udp_sum = word_sum(addresses) + word_sum(ports) + UDP
        if source.version == 4:
            first, middle = b"\x45\0", bytes((0, 0, _DONT_FRAGMENT, 0, HOP_LIMIT, UDP))
            self._fixed = (first, middle, addresses + ports)
            self._ip_sum = word_sum(first) + word_sum(middle) + word_sum(addresses)
            self._build = self._build4
        else:
            self._fixed = (b"\x60\0\0\0", bytes((UDP, HOP_LIMIT)) + addresses + ports, b"")
            self._ip_sum = 0
            self._build = self._build6

    def build(self, payload: bytes, payload_sum: int) -> bytes:
        """The datagram that carries `payload`, whose `word_sum` is known."""
        return self._build(payload, payload_sum)

    def _build4(self, payload: bytes, payload_sum: int) -> bytes:
        first, middle, rest = self._fixed
        size = 8 + len(payload)
        total = 20 + size
        checksum = udp_complement(self._udp_sum + 2 * size + payload_sum)
        return _HEAD4.pack(first, total, middle, complement(self._ip_sum + total), rest, size, checksum) + payload

    def _build6(self, payload: bytes, payload_sum: int) -> bytes:
        first, rest, _ = self._fixed
        size = 8 + len(payload)
        checksum = udp_complement(self._udp_sum + 2 * size + payload_sum)
        return _HEAD6.pack(first, size, rest, size, checksum) + payload


def build_datagrams(payloads: Sequence[bytes], flows: Sequence[Flow]) -> list[bytes]:
    """Each payload to each flow, in order."""
    if len(flows) == 1:
        build = flows[0].build
        return [build(payload, word_sum(payload)) for payload in payloads]
    found: list[bytes] = []
    for payload in payloads:
        payload_sum = word_sum(payload)
        found += [flow.build(payload, payload_sum) for flow in flows]
    return found


@dataclass(frozen=True, slots=True)
class Host:
    """Who we are, and who may send to us; None for anybody."""

    address: Address
    port: int
    peers: Collection[Address] | None
    largest: int = 65_535  # bytes of the largest payload accepted
    own: bytes = field(init=False, repr=False)
    known: frozenset[bytes] | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "own", self.address.packed)
        known = None if self.peers is None else frozenset(peer.packed for peer in self.peers)
        object.__setattr__(self, "known", known)


@dataclass(slots=True)
class Received:
    """What a batch of IP packets came to."""

    payloads: list[bytes] = field(default_factory=list)
    answers: list[bytes] = field(default_factory=list)  # IP packets to send: answers to echo requests
    drops: Counter[Drop] = field(default_factory=Counter)


def receive(packets: Sequence[bytes], host: Host) -> Received:
    """Sort a batch of IP packets. Never raises."""
    found = Received()
    payloads, drops = found.payloads, found.drops
    read = _read4 if host.address.version == 4 else _read6
    for packet in packets:
        payload = read(packet, host, found.answers)
        if isinstance(payload, bytes):
            payloads.append(payload)
        elif payload is not None:
            drops[payload] += 1
    return found


def _read4(packet: bytes, host: Host, answers: list[bytes]) -> bytes | Drop | None:
    """The payload, why there is none, or None if the packet was answered."""
    if len(packet) < 20 or packet[0] >> 4 != 4:
        return Drop.IP_MALFORMED
    head = (packet[0] & 15) * 4
    total = packet[2] << 8 | packet[3]
    if not 20 <= head <= total <= len(packet):
        return Drop.IP_MALFORMED
    if word_sum(packet[:head]):
        return Drop.IP_CHECKSUM
    if packet[16:20] != host.own:
        return Drop.IP_OTHER_ADDRESS
    if (packet[6] << 8 | packet[7]) & _MORE_OR_OFFSET:
        return Drop.IP_FRAGMENT
    protocol = packet[9]
    if protocol == UDP:
        return _read_udp(packet, head, total, packet[12:20], host)
    if protocol == ICMP[4]:
        return _read_icmp(packet, head, total, 4, host, answers)
    return Drop.IP_PROTOCOL


def _read6(packet: bytes, host: Host, answers: list[bytes]) -> bytes | Drop | None:
    if len(packet) < 40 or packet[0] >> 4 != 6:
        return Drop.IP_MALFORMED
    total = 40 + (packet[4] << 8 | packet[5])
    if total > len(packet):
        return Drop.IP_MALFORMED
    if packet[24:40] != host.own:
        return Drop.IP_OTHER_ADDRESS
    protocol = packet[6]
    if protocol == UDP:
        return _read_udp(packet, 40, total, packet[8:40], host)
    if protocol == ICMP[6]:
        return _read_icmp(packet, 40, total, 6, host, answers)
    return Drop.IP_FRAGMENT if protocol == _FRAGMENT else Drop.IP_PROTOCOL


def _read_udp(packet: bytes, at: int, total: int, addresses: bytes, host: Host) -> bytes | Drop:
    """The UDP datagram at `at`; the IP header is in order."""
    if at + 8 > total:
        return Drop.IP_MALFORMED
    size = packet[at + 4] << 8 | packet[at + 5]
    if not 8 <= size <= total - at:
        return Drop.IP_MALFORMED
    if packet[at + 2] << 8 | packet[at + 3] != host.port:
        return Drop.IP_OTHER_PORT
    if host.known is not None and addresses[: len(host.own)] not in host.known:
        return Drop.IP_UNKNOWN_PEER
    if packet[at + 6 : at + 8] == b"\0\0":
        if len(host.own) == 16:  # IPv6 has no datagrams without a checksum
            return Drop.IP_CHECKSUM
    elif (word_sum(addresses) + UDP + size + word_sum(packet[at : at + size])) % 65_535:
        return Drop.IP_CHECKSUM
    if not 0 < size - 8 <= host.largest:
        return Drop.RX_REFUSED
    return packet[at + 8 : at + size]


def _read_icmp(packet: bytes, at: int, total: int, version: int, host: Host, answers: list[bytes]) -> Drop | None:
    """Answer an echo request; sort everything else by what it says."""
    message = packet[at:total]
    pseudo = 0
    if version == 6:
        pseudo = word_sum(packet[8:40]) + ICMP[6] + len(message)
    if len(message) < 8:
        return Drop.IP_MALFORMED
    if (word_sum(message) + pseudo) % 65_535:
        return Drop.IP_CHECKSUM
    kind, code = message[0], message[1]
    request, answer = _ECHO[version]
    if kind == request and code == 0:
        if packet[8 if version == 6 else 12] >= (0xFF if version == 6 else 0xE0):
            return Drop.IP_MALFORMED  # a group or broadcast address as source
        answers.append(_answer(packet, answer, message, version))
        return None
    if not _quotes_us(message[8:], version, host):
        return Drop.ICMP_OTHER
    if version == 6 and kind == _TOO_BIG6:
        return Drop.ICMP_TOO_BIG
    if kind == _UNREACHABLE[version]:
        needed = version == 4 and code == _FRAGMENTATION_NEEDED
        return Drop.ICMP_TOO_BIG if needed else Drop.ICMP_UNREACHABLE
    return Drop.ICMP_OTHER


def _quotes_us(quoted: bytes, version: int, host: Host) -> bool:
    """Whether an error is about a datagram of ours: its header begins with our address and port."""
    if not quoted or quoted[0] >> 4 != version:
        return False
    source, at, protocol = (12, (quoted[0] & 15) * 4, 9) if version == 4 else (8, 40, 6)
    if len(quoted) < at + 4 or quoted[protocol] != UDP:
        return False
    return quoted[source : source + len(host.own)] == host.own and quoted[at] << 8 | quoted[at + 1] == host.port


def _answer(packet: bytes, kind: int, message: bytes, version: int) -> bytes:
    """The IP packet that answers an echo request."""
    bare = bytes((kind, 0, 0, 0)) + message[4:]
    if version == 4:
        size = (20 + len(bare)).to_bytes(2, "big")
        head = b"\x45\0" + size + bytes((0, 0, _DONT_FRAGMENT, 0, HOP_LIMIT, ICMP[4]))
        addresses = packet[16:20] + packet[12:16]
        checksum = complement(word_sum(head) + word_sum(addresses)).to_bytes(2, "big")
        return head + checksum + addresses + _with_checksum(bare, word_sum(bare))
    size = len(bare).to_bytes(2, "big")
    addresses = packet[24:40] + packet[8:24]
    total = word_sum(bare) + word_sum(addresses) + ICMP[6] + len(bare)
    return b"\x60\0\0\0" + size + bytes((ICMP[6], HOP_LIMIT)) + addresses + _with_checksum(bare, total)


def _with_checksum(message: bytes, total: int) -> bytes:
    return message[:2] + complement(total).to_bytes(2, "big") + message[4:]
