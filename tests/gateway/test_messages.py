"""The payloads of a tunnel's link: bundles and messages, whatever arrives."""

from __future__ import annotations

import itertools
from ipaddress import ip_interface

from hypothesis import given
from hypothesis import strategies as st

from rnsfast.gateway.lost import Lost
from rnsfast.gateway.messages import (
    BUNDLE,
    MAX_ADDRESSES,
    Bye,
    Hello,
    Ping,
    Pong,
    Reason,
    build_control,
    bundle,
    parse_control,
    unbundle,
)

MDU = 431
interfaces = st.one_of(
    st.tuples(st.ip_addresses(v=4), st.integers(0, 32)), st.tuples(st.ip_addresses(v=6), st.integers(0, 128))
).map(lambda pair: ip_interface(f"{pair[0]}/{pair[1]}"))
messages = st.one_of(
    st.builds(Hello, st.just(1), st.integers(0, 65535), st.lists(interfaces, max_size=MAX_ADDRESSES).map(tuple)),
    st.builds(Ping, st.binary(min_size=4, max_size=4)),
    st.builds(Pong, st.binary(min_size=4, max_size=4)),
    st.builds(Bye, st.integers(0, 255)),
)


def opened(payloads: list[bytes]) -> list[bytes]:
    packets: list[bytes] = []
    for payload in payloads:
        if payload[0] == BUNDLE:
            assert unbundle(payload, packets) is None
        else:
            packets.append(payload)
    return packets


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[bytes], int]:
    mdu = draw(st.integers(431, 2000))
    sizes = draw(st.lists(st.integers(20, mdu), max_size=80))
    return [bytes((0x45, i % 256)) + bytes(size - 2) for i, size in enumerate(sizes)], mdu


@given(batches())
def test_bundling_keeps_bytes_and_order_and_fits(batch: tuple[list[bytes], int]) -> None:
    packets, mdu = batch
    payloads = bundle(packets, mdu)
    assert opened(payloads) == packets
    assert all(len(payload) <= mdu for payload in payloads)
    for one, two in itertools.pairwise(payloads):  # no payload could have taken what the next begins with
        first = opened([two])[0]
        packed = len(one) if one[0] == BUNDLE else len(one) + 3
        assert packed + 2 + len(first) > mdu


def test_a_drain_of_acknowledgements_is_one_payload() -> None:
    packets = [bytes((0x45, i)) + bytes(50) for i in range(64)]
    assert len(bundle(packets, 16303)) == 1
    assert len(bundle(packets, 431)) == 10  # seven of 54 bytes each


def test_a_packet_alone_goes_as_it_is_up_to_the_last_byte() -> None:
    assert bundle([b"E" * MDU], MDU) == [b"E" * MDU]
    assert bundle([b"E" * 40], MDU) == [b"E" * 40]
    assert bundle([b"E" * MDU, b"F" * 30, b"G" * MDU], MDU) == [b"E" * MDU, b"F" * 30, b"G" * MDU]
    assert bundle([], MDU) == []


@given(st.binary(max_size=600))
def test_whatever_arrives_as_a_bundle_never_raises_and_what_is_whole_counts(raw: bytes) -> None:
    packets: list[bytes] = []
    problem = unbundle(b"\x01" + raw, packets)
    used = sum(len(packet) + 2 for packet in packets)
    assert problem is (None if used == len(raw) else Lost.IN_BUNDLE)
    assert b"".join(len(p).to_bytes(2, "big") + p for p in packets) == raw[:used]


@given(st.binary(max_size=400))
def test_whatever_arrives_as_a_message_never_raises(raw: bytes) -> None:
    message = parse_control(b"\x02" + raw)
    if message is not None and not (isinstance(message, Hello) and message.version != 1):
        again = build_control(message)
        assert parse_control(again) == message


@given(messages)
def test_a_message_reads_as_it_was_meant_and_fits_the_smallest_link(message: Hello | Ping | Pong | Bye) -> None:
    raw = build_control(message)
    assert parse_control(raw) == message and len(raw) <= MDU
    assert parse_control(raw + b"what a later version adds") == message


@given(messages)
def test_a_message_cut_short_is_none(message: Hello | Ping | Pong | Bye) -> None:
    raw = build_control(message)
    assert all(parse_control(raw[:end]) is None for end in range(1, len(raw)))


def test_a_hello_of_another_version_is_read_as_far_as_its_version() -> None:
    assert parse_control(bytes((2, 1, 9, 5, 220, 200))) == Hello(9, 1500, ())


def test_layouts_as_documented() -> None:
    hello = Hello(1, 1500, (ip_interface("10.77.0.1/24"), ip_interface("fd77::1/64")))
    assert build_control(hello).hex() == (
        "0201" + "01" + "05dc" + "02" + "0418" + "0a4d0001" + "0640" + "fd770000000000000000000000000001"
    )
    assert build_control(Ping(b"abcd")) == b"\x02\x02abcd"
    assert build_control(Pong(b"abcd")) == b"\x02\x03abcd"
    assert build_control(Bye(Reason.SHUT_DOWN)) == b"\x02\x04\x01"
    assert bundle([b"E1", b"E22"], MDU) == [b"\x01\x00\x02E1\x00\x03E22"]
