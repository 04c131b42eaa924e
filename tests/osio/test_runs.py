"""Which packets travel as one, and how what travelled as one is taken apart."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rnsfast.osio.contract import Peer
from rnsfast.osio.peers import make_peer, parse_peer
from rnsfast.osio.runs import (
    CONTROL,
    LONG_RUN_PACKETS,
    RUN_BYTES,
    RUN_PACKETS,
    SOL_UDP,
    UDP_GRO,
    UDP_SEGMENT,
    cut,
    plan_runs,
    run_packets,
    segment_control,
    segment_size,
)

A, B = make_peer("192.0.2.1", 1), make_peer("192.0.2.2", 1)


def sizes(*lengths: int) -> list[bytes]:
    return [bytes(n) for n in lengths]


@pytest.mark.parametrize(
    ("items", "runs"),
    [
        (sizes(5, 5, 5), [(0, 3)]),
        (sizes(5, 5, 3), [(0, 3)]),  # a shorter one may be the last
        (sizes(5, 3, 5), [(0, 2), (2, 3)]),  # and nothing may follow it
        (sizes(5, 6, 6), [(0, 1), (1, 3)]),  # a longer one begins another
        (sizes(5, 0, 5), [(0, 1), (1, 2), (2, 3)]),  # an empty one stands alone
        (sizes(7), [(0, 1)]),
        ([], []),
        ([bytes(100)] * 64, [(0, 63), (63, 64)]),
        ([bytes(100)] * 126, [(0, 63), (63, 126)]),
        ([bytes(1300)] * 51, [(0, 50), (50, 51)]),  # 65,000 bytes
        ([bytes(2000)] * 3, [(0, 1), (1, 2), (2, 3)]),  # above the ceiling
    ],
)
def test_plan(items: list[bytes], runs: list[tuple[int, int]]) -> None:
    assert plan_runs(items, None, 0, len(items), 1999) == runs


@pytest.mark.parametrize(
    ("release", "packets"),
    [
        ("6.9.0", LONG_RUN_PACKETS), ("6.18.2-cloud", LONG_RUN_PACKETS), ("7.0", LONG_RUN_PACKETS),
        ("6.8.12", RUN_PACKETS), ("5.15.0-91-generic", RUN_PACKETS), ("", RUN_PACKETS), ("unknown", RUN_PACKETS),
    ],
)  # fmt: skip
def test_how_long_runs_may_be_depends_on_the_kernel(release: str, packets: int) -> None:
    assert run_packets(release) == packets


@given(st.integers(1, 3000), st.integers(1, 200), st.integers(0, 9), st.sampled_from([RUN_PACKETS, LONG_RUN_PACKETS]))
def test_packets_of_one_size_are_planned_as_if_each_were_looked_at(
    size: int, count: int, first: int, most: int
) -> None:
    items = [bytes(size)] * count
    first = min(first, count)
    at_a_glance = plan_runs(items, None, first, count, 2000, most)
    assert at_a_glance == plan_runs(items, [A] * count, first, count, 2000, most)


def test_a_run_ends_with_its_peer() -> None:
    items: list[bytes] = sizes(5, 5, 5, 5)
    assert plan_runs(items, [A, A, B, A], 0, 4, 100) == [(0, 2), (2, 3), (3, 4)]


@given(
    st.lists(st.tuples(st.sampled_from([1, 2, 19, 500, 1064, 1400]), st.sampled_from([A, B])), max_size=200),
    st.integers(0, 20),
    st.sampled_from([0, 600, 2000]),
)
def test_every_plan_rebuilds_to_the_packets_in_order(kinds: list[tuple[int, Peer]], first: int, ceiling: int) -> None:
    items = [bytes((n & 255,)) * size for n, (size, _) in enumerate(kinds)]
    peers = [peer for _, peer in kinds]
    first = min(first, len(items))
    rebuilt: list[bytes] = []
    for start, end in plan_runs(items, peers, first, len(items), ceiling):
        run = items[start:end]
        assert len({peers[i].raw for i in range(start, end)}) == 1
        assert len(run) <= RUN_PACKETS and (len(run) == 1 or sum(map(len, run)) <= RUN_BYTES)
        assert len(run) == 1 or len(run[0]) <= ceiling
        joined = b"".join(run)
        rebuilt += [joined[at : at + len(run[0])] for at in range(0, len(joined), len(run[0]))]
    assert rebuilt == items[first:]


def test_the_control_message_is_what_the_kernel_reads() -> None:
    raw = segment_control(1064)
    assert len(raw) == CONTROL and struct.unpack("=QiiH6x", raw) == (18, SOL_UDP, UDP_SEGMENT, 1064)


def message(kind: int, value: bytes, length: int | None = None) -> bytes:
    raw = struct.pack("=Qii", 16 + len(value) if length is None else length, SOL_UDP, kind) + value
    return raw + bytes(-len(raw) % 8)


@pytest.mark.parametrize(
    ("control", "size"),
    [
        (b"", 0),
        (message(UDP_GRO, struct.pack("=i", 500)), 500),
        (message(UDP_GRO, struct.pack("=i", 0)), 0),
        (message(UDP_GRO, struct.pack("=i", -5)), 0),
        (message(99, b"1234") + message(UDP_GRO, struct.pack("=i", 7)), 7),
        (message(UDP_GRO, struct.pack("=i", 500))[:19], 0),  # cut
        (message(UDP_GRO, b"", length=16), 0),  # without its value
        (message(99, b"1234", length=2**63), 0),  # a length that overflows
        (message(99, b"1234", length=3) + message(UDP_GRO, struct.pack("=i", 7)), 0),
        (b"\0" * 5, 0),
    ],
)
def test_segment_sizes_are_not_taken_on_trust(control: bytes, size: int) -> None:
    assert segment_size(control) == size


@given(st.binary(max_size=80))
def test_no_control_message_raises(control: bytes) -> None:
    assert segment_size(control) >= 0


@pytest.mark.parametrize(
    ("length", "size", "pieces"),
    [
        (10, 0, [10]),
        (10, 10, [10]),
        (10, 11, [10]),
        (10, 5, [5, 5]),
        (10, 4, [4, 4, 2]),
        (3, 1, [1, 1, 1]),
        (10, -1, [10]),
    ],
)
def test_cutting(length: int, size: int, pieces: list[int]) -> None:
    data = memoryview(bytes(range(length)))
    found = cut(data, size)
    assert [len(piece) for piece in found] == pieces and b"".join(found) == bytes(data)


@pytest.mark.parametrize("flavour", ["linux", "darwin", "windows"])
@pytest.mark.parametrize(("host", "port", "scope"), [("192.0.2.7", 4242, 0), ("fe80::1", 65535, 3), ("::", 0, 0)])
def test_addresses_read_back_as_they_were_built(flavour: str, host: str, port: int, scope: int) -> None:
    peer = make_peer(host, port, scope=scope, flavour=flavour)
    assert len(peer.raw) == (28 if ":" in host else 16)
    again = parse_peer(peer.raw, flavour)
    assert again == peer and (again.host, again.port, again.scope, again.family) == (host, port, scope, peer.family)
    assert parse_peer(peer.raw[:-1], flavour) is None
    assert parse_peer(b"\xff\xff" + peer.raw[2:], flavour) is None


@pytest.mark.parametrize(("host", "port"), [("example.org", 1), ("192.0.2.1", 65536), ("192.0.2.1", -1), ("", 1)])
def test_what_is_no_address_is_refused(host: str, port: int) -> None:
    with pytest.raises(ValueError, match=r"numeric address|not within"):
        make_peer(host, port)
