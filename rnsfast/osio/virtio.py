"""The virtio-net header before the packets of a TUN device, and what it allows the kernel to leave to us.

    offset  size  field        (host byte order; protocol 09, sections 5.1 and 5.5)
    0       1     flags        1: the checksum is to be finished
    1       1     type         0 a packet, 1 TCP over IPv4, 4 TCP over IPv6, 5 UDP segments; 0x80: with ECN
    2       2     header size  not trusted: it may be that of the whole first segment
    4       2     segment      bytes of payload a segment
    6       2     start        where the checksum begins: at the transport header
    8       2     offset       where it stands, from `start`

A super-packet becomes the IP packets that the kernel would have sent: lengths, identifiers, sequence numbers, flags and
checksums of their own. Pure functions; what is malformed is dropped and counted, never raised.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

from rnsfast.osio.checksum import complement, udp_complement, word_sum

HEADER: Final = struct.Struct("=BBHHHH")  # 10 bytes
NO_HEADER: Final = bytes(HEADER.size)  # before what we send: nothing to do
ROOM: Final = 65_536 + 256  # bytes of the largest frame: header and super-packet

NEEDS_CHECKSUM: Final = 1
TCP4, TCP6, UDP_SEGMENTS = 1, 4, 5
ECN: Final = 0x80

_TCP: Final = 6
_UDP: Final = 17
_FIN_PSH: Final = 0x09  # belong to the last segment
_CWR: Final = 0x80  # belongs to the first


def unpack_many(frames: Sequence[bytes]) -> tuple[list[bytes], int]:
    """The IP packets in `frames`, in order, and how many frames were malformed."""
    packets: list[bytes] = []
    bad = 0
    for frame in frames:
        if frame[:2] == b"\0\0" and len(frame) > HEADER.size:
            packets.append(frame[HEADER.size :])
            continue
        found = unpack(frame)
        if found is None:
            bad += 1
        else:
            packets += found
    return packets, bad


def unpack(frame: bytes) -> list[bytes] | None:
    """The IP packets in one frame; None if it is malformed."""
    if len(frame) <= HEADER.size:
        return None
    flags, kind, _, segment, start, offset = HEADER.unpack_from(frame)
    packet = frame[HEADER.size :]
    kind &= ~ECN
    if kind:
        if not flags & NEEDS_CHECKSUM or not segment:
            return None
        return _split(packet, kind, segment, start)
    if flags & NEEDS_CHECKSUM:
        finished = finish_checksum(packet, start, offset)
        return None if finished is None else [finished]
    return [packet]


def finish_checksum(packet: bytes, start: int, offset: int) -> bytes | None:
    """`packet` with the checksum of everything from `start` on; the sum of the pseudo header stands in its place."""
    at = start + offset
    if not start or at + 2 > len(packet):
        return None
    udp = offset == 6  # the place in a UDP header; in the others 0 is a checksum like any other
    total = word_sum(packet[start:])
    return packet[:at] + (udp_complement if udp else complement)(total).to_bytes(2, "big") + packet[at + 2 :]


def _split(packet: bytes, kind: int, segment: int, start: int) -> list[bytes] | None:
    """A super-packet as packets with at most `segment` bytes of payload."""
    version = packet[0] >> 4
    protocol = _UDP if kind == UDP_SEGMENTS else _TCP
    if version == 4:
        fits = kind in (TCP4, UDP_SEGMENTS) and len(packet) >= 20 and packet[9] == protocol
        if not fits or start != (packet[0] & 15) * 4 or int.from_bytes(packet[2:4], "big") != len(packet):
            return None
        addresses = packet[12:20]
    elif version == 6:
        fits = kind in (TCP6, UDP_SEGMENTS) and len(packet) >= 40 and start >= 40
        if not fits or int.from_bytes(packet[4:6], "big") + 40 != len(packet):
            return None
        addresses = packet[8:40]
    else:
        return None
    if start < 20 or start + (20 if protocol == _TCP else 8) > len(packet):
        return None
    body = start + ((packet[start + 12] >> 4) * 4 if protocol == _TCP else 8)
    if body - start < 8 or body >= len(packet) or (protocol == _TCP and body - start < 20):
        return None
    pseudo = word_sum(addresses) + protocol
    pieces = [packet[at : at + segment] for at in range(body, len(packet), segment)]
    network, transport = packet[:start], packet[start:body]
    cut = (
        _tcp_segments(transport, pieces, segment, pseudo)
        if protocol == _TCP
        else _udp_segments(transport, pieces, pseudo)
    )
    write = _ipv4_header if version == 4 else _ipv6_header
    return [write(network, number, len(part)) + part for number, part in enumerate(cut)]


def _ipv4_header(header: bytes, number: int, length: int) -> bytes:
    """The header of packet `number`, for `length` bytes behind it."""
    identifier = (int.from_bytes(header[4:6], "big") + number) & 0xFFFF
    size = (len(header) + length).to_bytes(2, "big")
    bare = header[:2] + size + identifier.to_bytes(2, "big") + header[6:10] + b"\0\0" + header[12:]
    return bare[:10] + complement(word_sum(bare)).to_bytes(2, "big") + bare[12:]


def _ipv6_header(header: bytes, number: int, length: int) -> bytes:
    return header[:4] + (len(header) - 40 + length).to_bytes(2, "big") + header[6:]


def _tcp_segments(header: bytes, pieces: Sequence[bytes], segment: int, pseudo: int) -> list[bytes]:
    first = int.from_bytes(header[4:8], "big")
    last = len(pieces) - 1
    found = []
    for number, piece in enumerate(pieces):
        sequence = (first + number * segment) & 0xFFFFFFFF
        flags = header[13] & ~((_CWR if number else 0) | (0 if number == last else _FIN_PSH))
        bare = header[:4] + sequence.to_bytes(4, "big") + header[8:13] + bytes((flags,)) + header[14:16]
        rest = header[18:]  # urgent pointer and options
        total = pseudo + len(header) + len(piece) + word_sum(bare) + word_sum(rest) + word_sum(piece)
        found.append(b"".join((bare, complement(total).to_bytes(2, "big"), rest, piece)))
    return found


def _udp_segments(header: bytes, pieces: Sequence[bytes], pseudo: int) -> list[bytes]:
    ports = header[:4]
    found = []
    for piece in pieces:
        size = 8 + len(piece)
        total = pseudo + size + word_sum(ports) + size + word_sum(piece)
        found.append(ports + size.to_bytes(2, "big") + udp_complement(total).to_bytes(2, "big") + piece)
    return found
