"""Super-packets become the packets that the kernel would have sent: by plain arithmetic, and with a real kernel.

`ip_packets.parse` adds words one by one and refuses wrong lengths and checksums. It shares nothing with the product.
"""

from __future__ import annotations

import ipaddress
import random
import socket
import struct
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rnsfast.osio.checksum import complement, udp_complement, word_sum
from rnsfast.osio.linux_tun import LinuxTun, open_linux_tun
from rnsfast.osio.tun import TunIO
from rnsfast.osio.virtio import ECN, HEADER, NEEDS_CHECKSUM, TCP4, TCP6, UDP_SEGMENTS, unpack, unpack_many
from tests.fakes import PATIENCE
from tests.namespaces import Namespace, namespace, need_devices
from tests.osio.ip_packets import checksum, ip4, ip6, parse, pseudo, udp4, udp6

FIN, SYN, PSH, ACK, CWR = 0x01, 0x02, 0x08, 0x10, 0x80
ENDS = {4: ("10.1.2.3", "10.4.5.6"), 6: ("fd00::1:2", "fd00::3:4")}


def ends(version: int) -> tuple[bytes, bytes]:
    left, right = (ipaddress.ip_address(text).packed for text in ENDS[version])
    return left, right


def header(kind: int, segment: int, start: int, offset: int, *, flags: int = NEEDS_CHECKSUM, size: int = 54) -> bytes:
    return HEADER.pack(flags, kind, size, segment, start, offset)


def partial(body: bytes, at: int, protocol: int, version: int) -> bytes:
    """As the kernel leaves it: the sum of the pseudo header stands where the checksum will."""
    total = ~checksum(pseudo(*ends(version), protocol, len(body))) & 0xFFFF
    return body[:at] + struct.pack(">H", total) + body[at + 2 :]


def ip_of(version: int, protocol: int, body: bytes, identifier: int = 0) -> bytes:
    if version == 4:
        return ip4(*ENDS[4], protocol, body, identifier=identifier)
    return ip6(*ENDS[6], protocol, body)


def tcp_frame(
    version: int,
    payload: bytes,
    segment: int,
    *,
    flags: int = ACK,
    sequence: int = 1,
    options: bytes = b"",
    ident: int = 0,
) -> bytes:
    words = 5 + len(options) // 4
    head = struct.pack(">HHIIBBHHH", 1111, 2222, sequence, 77, words << 4, flags, 500, 0, 9) + options
    body = partial(head + payload, 16, 6, version)
    kind = TCP4 if version == 4 else TCP6
    return header(kind, segment, 20 if version == 4 else 40, 16) + ip_of(version, 6, body, ident)


def udp_frame(version: int, payload: bytes, segment: int, ident: int = 0) -> bytes:
    body = partial(struct.pack(">HHHH", 1111, 2222, 8 + len(payload), 0) + payload, 6, 17, version)
    return header(UDP_SEGMENTS, segment, 20 if version == 4 else 40, 6) + ip_of(version, 17, body, ident)


# -- the checksum -------------------------------------------------------------------------------------------------


@given(st.binary(min_size=1, max_size=400))
def test_checksum_is_that_of_the_rfc(data: bytes) -> None:
    assume(any(data))  # headers are never all zeros
    assert complement(word_sum(data)) == checksum(data)
    assert udp_complement(word_sum(data)) == (checksum(data) or 0xFFFF)


@given(st.binary(max_size=60).filter(lambda part: len(part) % 2 == 0), st.binary(min_size=1, max_size=60))
def test_sums_of_parts_add_up(first: bytes, second: bytes) -> None:
    assume(any(first + second))
    assert complement(word_sum(first) + word_sum(second)) == checksum(first + second)


# -- splitting ----------------------------------------------------------------------------------------------------

VERSIONS = st.sampled_from([4, 6])
PAYLOADS = st.tuples(st.integers(1, 5000), st.integers(0, 1 << 30)).map(lambda e: random.Random(e[1]).randbytes(e[0]))


@given(
    VERSIONS,
    PAYLOADS,
    st.integers(20, 1500),
    st.integers(0, 0xFFFFFFFF),
    st.sampled_from([ACK, ACK | PSH, ACK | FIN, ACK | PSH | FIN | CWR, ACK | CWR]),
    st.sampled_from([b"", b"\1\1\10\12" + bytes(8)]),
    st.integers(0, 0xFFFF),
)
def test_tcp_segments(
    version: int, payload: bytes, segment: int, sequence: int, flags: int, options: bytes, ident: int
) -> None:
    frame = tcp_frame(version, payload, segment, flags=flags, sequence=sequence, options=options, ident=ident)
    packets = unpack(frame)
    assert packets is not None
    parts = [parse(packet) for packet in packets]
    assert b"".join(part.payload for part in parts) == payload
    assert len(parts) == -(-len(payload) // segment)
    for number, part in enumerate(parts):
        last = number == len(parts) - 1
        assert (part.source, part.destination) == ends(version)
        assert last or len(part.payload) == segment
        assert part.sequence == (sequence + number * segment) % (1 << 32)
        expected = flags & ~(0 if last else FIN | PSH) & ~(CWR if number else 0)
        assert part.flags == expected
        assert part.header[-len(options) :] == options if options else len(part.header) == 18
        if version == 4:
            assert (part.identifier, part.fragment) == ((ident + number) % 65_536, 0x4000)


@given(VERSIONS, PAYLOADS, st.integers(20, 1500), st.integers(0, 0xFFFF))
def test_udp_segments(version: int, payload: bytes, segment: int, ident: int) -> None:
    packets = unpack(udp_frame(version, payload, segment, ident))
    assert packets is not None
    parts = [parse(packet) for packet in packets]
    assert [part.payload for part in parts] == [payload[at : at + segment] for at in range(0, len(payload), segment)]
    assert {part.ports for part in parts} == {(1111, 2222)}


def test_the_mark_of_ecn_changes_nothing() -> None:
    frame = tcp_frame(4, bytes(3000), 1000, flags=ACK | CWR)
    marked = frame[:1] + bytes((frame[1] | ECN,)) + frame[2:]
    assert unpack(marked) == unpack(frame)


def test_the_header_size_is_not_trusted() -> None:
    frame = tcp_frame(4, bytes(3000), 1000)
    wrong = frame[:2] + struct.pack("=H", 1040) + frame[4:]
    assert unpack(wrong) == unpack(frame)


# -- plain packets ------------------------------------------------------------------------------------------------


@given(VERSIONS, st.binary(max_size=300))
def test_an_unfinished_checksum_is_finished(version: int, payload: bytes) -> None:
    body = partial(struct.pack(">HHHH", 5, 6, 8 + len(payload), 0) + payload, 6, 17, version)
    packets = unpack(header(0, 0, 20 if version == 4 else 40, 6) + ip_of(version, 17, body))
    assert packets is not None
    assert [parse(packet).payload for packet in packets] == [payload]


def test_a_finished_packet_is_left_as_it_is() -> None:
    packet = udp4(*ENDS[4], 1, 2, b"x")
    assert unpack_many([bytes(10) + packet, HEADER.pack(2, 0, 0, 0, 0, 0) + packet]) == ([packet] * 2, 0)


# -- malformed ----------------------------------------------------------------------------------------------------

GOOD = tcp_frame(4, bytes(300), 100)
MALFORMED = {
    "nothing": b"",
    "header only": bytes(10),
    "unknown type": header(3, 100, 20, 16) + GOOD[10:],
    "no segment size": header(TCP4, 0, 20, 16) + GOOD[10:],
    "no checksum to finish": header(TCP4, 100, 20, 16, flags=0) + GOOD[10:],
    "start inside the IP header": header(TCP4, 100, 12, 16) + GOOD[10:],
    "start beyond the packet": header(TCP4, 100, 9000, 16) + GOOD[10:],
    "other IP version": header(TCP6, 100, 40, 16) + GOOD[10:],
    "UDP that is TCP": header(UDP_SEGMENTS, 100, 20, 6) + GOOD[10:],
    "cut": GOOD[:-1],
    "longer than its length": GOOD + b"x",
    "no payload": tcp_frame(4, b"", 100),
    "TCP header too short": GOOD[:42] + b"\x10" + GOOD[43:],
    "TCP header beyond the packet": header(TCP4, 5, 20, 16) + ip4(*ENDS[4], 6, GOOD[30:42] + b"\xf0" + bytes(11)),
    "checksum beyond the packet": header(0, 0, 20, 900) + GOOD[10:],
    "checksum from nowhere": header(0, 0, 0, 6) + GOOD[10:],
    "IPv6 header cut": header(TCP6, 100, 40, 16) + b"\x60" + bytes(20),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_what_is_malformed_is_counted(what: str) -> None:
    assert unpack(MALFORMED[what]) is None
    packet = udp4(*ENDS[4], 1, 2, b"x")
    assert unpack_many([bytes(10) + packet, MALFORMED[what], bytes(10) + packet]) == ([packet, packet], 1)


@given(st.binary(max_size=200), st.integers(0, 9), st.binary(min_size=1, max_size=60))
def test_nothing_raises(garbage: bytes, at: int, change: bytes) -> None:
    unpack(garbage)
    unpack(GOOD[:at] + change + GOOD[at + len(change) :])


# -- through a descriptor -----------------------------------------------------------------------------------------


@pytest.fixture
def vnet(variant: str) -> Iterator[tuple[TunIO, socket.socket]]:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    io = TunIO(near.detach(), max_batch=2, vnet_header=True)
    yield io, far
    io.close()
    far.close()


def test_what_does_not_fit_comes_next_and_in_order(vnet: tuple[TunIO, socket.socket]) -> None:
    io, far = vnet
    payload = random.Random(5).randbytes(500)
    far.send(tcp_frame(4, payload, 100))
    far.send(bytes(10) + udp6(*ENDS[6], 1, 2, b"after"))
    batch = io.make_batch()
    found, sizes, marks = [], [], []
    while count := io.recv(batch):
        sizes.append(count)
        marks.append(batch.uniform)
        found += [parse(item).payload for item in batch.take_all()]
    assert (sizes, marks) == ([2, 2, 2], [4, 4, None])
    assert found == [payload[at : at + 100] for at in range(0, 500, 100)] + [b"after"]


def test_one_packet_of_room_takes_one(variant: str) -> None:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    io = TunIO(near.detach(), max_batch=1, vnet_header=True)
    far.send(tcp_frame(6, bytes(300), 100))
    batch = io.make_batch()
    assert [io.recv(batch) for _ in range(4)] == [1, 1, 1, 0]
    io.close()
    far.close()


def test_a_malformed_frame_is_dropped_and_the_next_one_is_not(vnet: tuple[TunIO, socket.socket]) -> None:
    io, far = vnet
    far.send(MALFORMED["no segment size"])
    far.send(bytes(10) + udp4(*ENDS[4], 1, 2, b"x"))
    batch = io.make_batch()
    assert io.recv(batch) == 1
    assert (batch.dropped, io.stats.rx_dropped) == (1, 1)


def test_packets_are_written_behind_an_empty_header(vnet: tuple[TunIO, socket.socket]) -> None:
    io, far = vnet
    items = [udp4(*ENDS[4], 1, 2, bytes((i,))) for i in range(3)]
    assert io.send(items).sent == 3
    assert io.send_one(items[0]).sent == 1
    assert [far.recv(2000) for _ in range(4)] == [bytes(10) + item for item in [*items, items[0]]]


# -- a real kernel ------------------------------------------------------------------------------------------------


@pytest.fixture
def space() -> Iterator[Namespace]:
    need_devices()
    with namespace(ipv6=True) as made:
        yield made


def tcp_answer(packet: bytes, flags: int, sequence: int, acknowledged: int) -> bytes:
    """A segment without data from the far side, to whoever sent `packet`."""
    got = parse(packet)
    sport, dport = got.ports
    head = struct.pack(">HHIIBBHHH", dport, sport, sequence, acknowledged % (1 << 32), 5 << 4, flags, 65_535, 0, 0)
    found = checksum(pseudo(got.destination, got.source, 6, len(head)) + head)
    body = head[:16] + struct.pack(">H", found) + head[18:]
    names = [str(ipaddress.ip_address(raw)) for raw in (got.destination, got.source)]
    return ip4(names[0], names[1], 6, body) if got.version == 4 else ip6(names[0], names[1], 6, body)


@pytest.mark.parametrize("version", [4, 6])
def test_a_stream_of_the_kernel_comes_out_as_right_segments(space: Namespace, version: int) -> None:
    with space.inside():
        device: Any = open_linux_tun("rf0", vnet_header=True)
    assert isinstance(device, LinuxTun)
    assert device.io.caps.backend.endswith("-vnet"), "this kernel has no offloads for TUN devices"
    device.add_address({4: "10.77.0.1/24", 6: "fd77::1/64"}[version])
    device.up()
    far = {4: "10.77.0.2", 6: "fd77::2"}[version]
    content = random.Random(version).randbytes(200_000)
    with space.inside():
        sock = socket.socket(socket.AF_INET if version == 4 else socket.AF_INET6)
    sock.setblocking(False)
    sock.connect_ex((far, 80))
    received, unsent, total = bytearray(), memoryview(content), len(content)
    batch = device.io.make_batch()
    start, largest = None, 0
    frames = 0
    while len(received) < total:
        count = device.io.recv(batch, PATIENCE)
        assert count, "the stream stopped"
        answers = []
        for item in batch.take_all():
            if item[6 if version == 6 else 9] != 6:
                continue  # what a kernel says by itself over IPv6
            got = parse(item)
            assert len(item) <= device.mtu
            if got.flags & SYN:
                start = got.sequence + 1
                answers = [tcp_answer(item, SYN | ACK, 1000, start)]
                continue
            assert start is not None
            at = (got.sequence - start) % (1 << 32)
            if at == len(received):
                received += got.payload
                frames += 1
            largest = max(largest, len(got.payload))
            answers = [tcp_answer(item, ACK, 1001, start + len(received))]
        device.io.send(answers)
        while unsent:
            try:
                unsent = unsent[sock.send(unsent) :]
            except (BlockingIOError, BrokenPipeError):
                break
    assert bytes(received) == content
    assert device.io.stats.rx_calls < frames, "the kernel has sent no super-packets"
    assert largest > 500  # ours is the side that offers no larger segments
    sock.close()
    device.close()


@pytest.mark.parametrize("version", [4, 6])
def test_udp_segments_of_the_kernel(space: Namespace, version: int) -> None:
    with space.inside():
        device = open_linux_tun("rf0", vnet_header=True)
        sock = socket.socket(socket.AF_INET if version == 4 else socket.AF_INET6, socket.SOCK_DGRAM)
    device.add_address({4: "10.77.0.1/24", 6: "fd77::1/64"}[version])
    device.up()
    bodies = [bytes((i,)) * 700 for i in range(20)] + [b"short"]
    sock.connect(({4: "10.77.0.2", 6: "fd77::2"}[version], 99))
    sock.sendmsg(bodies, [(17, 103, struct.pack("=H", 700))])
    batch = device.io.make_batch()
    found: list[bytes] = []
    while len(found) < len(bodies):
        assert device.io.recv(batch, PATIENCE)
        found += [parse(item).payload for item in batch.take_all() if item[6 if version == 6 else 9] == 17]
    assert found == bodies
    sock.close()
    device.close()


def test_packets_we_write_with_headers_reach_a_socket(space: Namespace) -> None:
    with space.inside():
        device = open_linux_tun("rf0", vnet_header=True)
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    device.add_address("10.77.0.1/24")
    device.up()
    sock.bind(("10.77.0.1", 7))
    sock.settimeout(PATIENCE)
    assert device.io.send([udp4("10.77.0.2", "10.77.0.1", 5, 7, bytes((i,))) for i in range(10)]).sent == 10
    assert [sock.recv(10) for _ in range(10)] == [bytes((i,)) for i in range(10)]
    sock.close()
    device.close()
