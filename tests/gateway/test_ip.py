"""Which IP packets go through, and what the others are told."""

from __future__ import annotations

from collections import Counter
from ipaddress import ip_address, ip_interface, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rnsfast.gateway.icmp import Bucket, too_big
from rnsfast.gateway.ip import MEMORY, Allowed, Gate, whole
from rnsfast.gateway.lost import Lost
from tests.gateway.support import checksum, ipv4, ipv6

OWN = [ip_interface("10.77.0.1/24"), ip_interface("fd77::1/64")]


def gate(*routes: str) -> Gate:
    return Gate(OWN, [ip_network(route) for route in routes], Counter())


def refusal(check: Gate, packet: bytes, *, arriving: bool) -> Lost | None:
    check.lost.clear()
    passed = check.arriving([packet]) if arriving else check.leaving([packet], 65535, [])
    if passed:
        assert passed == [packet] and not check.lost
        return None
    ((reason, count),) = check.lost.items()
    assert count == 1
    return reason


# ------------------------------------------------------------------ headers


@given(st.binary(max_size=120))
def test_no_bytes_raise_in_either_direction(raw: bytes) -> None:
    check = gate("224.0.0.0/4")
    big: list[bytes] = []
    passed = [*check.leaving([raw], 60, big), *big, *check.arriving([raw])]
    assert len(passed) + sum(check.lost.values()) - len(big) == 2
    for packet in passed:
        assert raw.startswith(packet)
        answer = too_big(packet, 1280)
        assert answer is None or whole(answer) == answer


@given(st.sampled_from([4, 6]), st.integers(0, 60), st.integers(0, 60))
def test_what_stands_behind_a_packet_is_cut_off(version: int, size: int, more: int) -> None:
    made = ipv4("10.77.0.2", "10.77.0.1", bytes(size)) if version == 4 else ipv6("fd77::2", "fd77::1", bytes(size))
    assert whole(made + bytes(more)) == made
    for missing in range(1, min(more, len(made))):
        assert whole(made[:-missing]) is None


@pytest.mark.parametrize(
    "packet",
    [
        b"",
        b"\x45",
        ipv4("10.77.0.2", "10.77.0.1")[:19],
        b"\x44" + ipv4("10.77.0.2", "10.77.0.1")[1:],  # header of 16 bytes
        b"\x46" + ipv4("10.77.0.2", "10.77.0.1")[1:],  # header of 24 bytes in a packet of 20
        ipv4("10.77.0.2", "10.77.0.1")[:2] + b"\x00\x13" + ipv4("10.77.0.2", "10.77.0.1")[4:],
        ipv6("fd77::2", "fd77::1")[:39],
        b"\x55" + bytes(40),
    ],
)
def test_headers_that_cannot_be_right(packet: bytes) -> None:
    assert whole(packet) is None
    assert refusal(gate(), packet, arriving=True) is Lost.IN_HEADER
    assert refusal(gate(), packet, arriving=False) is Lost.OUT_HEADER


# ------------------------------------------------------------------ addresses


@pytest.mark.parametrize(
    ("source", "destination", "expected"),
    [
        ("10.77.0.2", "10.77.0.1", None),
        ("10.77.0.2", "192.168.1.1", None),  # where it goes is the kernel's matter
        ("10.88.1.1", "10.77.0.1", None),  # by the route
        ("10.99.1.1", "10.77.0.1", Lost.IN_SOURCE),
        ("10.77.0.1", "10.77.0.2", Lost.IN_SOURCE),  # nobody else is us
        ("10.77.0.2", "224.0.0.251", Lost.IN_MULTICAST),
        ("10.77.0.2", "255.255.255.255", Lost.IN_MULTICAST),
        ("10.77.0.2", "10.77.0.255", Lost.IN_MULTICAST),
        ("fd77::2", "fd77::1", None),
        ("fd78::2", "fd77::1", Lost.IN_SOURCE),
        ("fd77::1", "fd77::2", Lost.IN_SOURCE),
        ("fd77::2", "ff02::1", Lost.IN_MULTICAST),
        ("fe80::2", "fd77::1", Lost.IN_LINK_LOCAL),
    ],
)
def test_what_may_come_out_of_the_tunnel(source: str, destination: str, expected: Lost | None) -> None:
    make = ipv6 if ":" in source else ipv4
    assert refusal(gate("10.88.0.0/16"), make(source, destination, b"x"), arriving=True) is expected


@pytest.mark.parametrize(
    ("source", "destination", "expected"),
    [
        ("10.77.0.1", "10.77.0.2", None),
        ("192.168.1.5", "10.77.0.2", None),  # from a network behind us
        ("0.0.0.0", "10.77.0.2", Lost.OUT_SOURCE),
        ("224.0.0.1", "10.77.0.2", Lost.OUT_SOURCE),
        ("10.77.0.1", "224.0.0.22", Lost.OUT_MULTICAST),
        ("10.77.0.1", "10.77.0.255", Lost.OUT_MULTICAST),
        ("fd77::1", "fd77::2", None),
        ("fe80::1", "ff02::2", Lost.OUT_LINK_LOCAL),  # router solicitation
        ("::", "ff02::16", Lost.OUT_LINK_LOCAL),
        ("fe80::1", "fe80::2", Lost.OUT_LINK_LOCAL),
        ("fd77::1", "ff05::2", Lost.OUT_MULTICAST),
        ("ff02::1", "fd77::2", Lost.OUT_SOURCE),
    ],
)
def test_what_may_go_into_the_tunnel(source: str, destination: str, expected: Lost | None) -> None:
    make = ipv6 if ":" in source else ipv4
    assert refusal(gate(), make(source, destination, b"x"), arriving=False) is expected


def test_multicast_passes_if_a_route_asks_for_it() -> None:
    check = gate("224.0.0.0/4", "ff05::/16")
    for packet in (ipv4("10.77.0.2", "239.1.2.3"), ipv6("fd77::2", "ff05::2")):
        assert refusal(check, packet, arriving=True) is None
        assert refusal(check, packet, arriving=False) is None
    assert refusal(check, ipv6("fd77::2", "ff08::2"), arriving=True) is Lost.IN_MULTICAST


@given(st.lists(st.tuples(st.ip_addresses(v=4), st.integers(0, 32)), max_size=4), st.ip_addresses(v=4))
def test_allowed_is_what_the_networks_contain(pairs: list[tuple[object, int]], address: object) -> None:
    networks = [ip_network(f"{ip}/{prefix}", strict=False) for ip, prefix in pairs]
    allowed = Allowed(networks)
    for _ in range(2):  # the second time from memory
        assert (address.packed in allowed) is any(address in network for network in networks)  # type: ignore


def test_a_batch_keeps_its_order_and_counts_each_loss() -> None:
    check, big = gate(), []
    good = [ipv4("10.77.0.1", "10.77.0.2", bytes(i)) for i in range(5)]
    large = ipv4("10.77.0.1", "10.77.0.2", bytes(500))
    mixed = [good[0], b"\x45", good[1], large, ipv4("10.77.0.1", "224.0.0.1"), *good[2:]]
    assert check.leaving(mixed, 431, big) == good
    assert big == [large]
    assert check.lost == {Lost.OUT_HEADER: 1, Lost.OUT_TOO_BIG: 1, Lost.OUT_MULTICAST: 1}


# ------------------------------------------------------------------ too big


ADDRESSES = st.sampled_from(["10.77.0.1", "10.77.0.2", "10.77.0.255", "10.88.0.1", "224.0.0.5", "0.0.0.1", "8.8.8.8"])


@given(st.data())
def test_a_gate_that_has_seen_much_decides_like_one_that_has_seen_nothing(data: st.DataObject) -> None:
    """Pairs of addresses that passed are remembered; nothing else may follow from that."""
    old = gate("10.88.0.0/16")
    for _ in range(data.draw(st.integers(1, 12))):
        packet = bytearray(ipv4(data.draw(ADDRESSES), data.draw(ADDRESSES), bytes(data.draw(st.integers(0, 40)))))
        packet[0] = data.draw(st.sampled_from([0x45, 0x45, 0x45, 0x44, 0x46, 0x4F, 0x60]))
        packet[3] = (packet[3] + data.draw(st.sampled_from([0, 0, 0, 1, -1]))) % 256
        packet += bytes(data.draw(st.sampled_from([0, 0, 1])))
        raw, limit = bytes(packet), data.draw(st.sampled_from([65535, 40]))
        fresh = gate("10.88.0.0/16")
        old.lost.clear()
        large: tuple[list[bytes], list[bytes]] = ([], [])
        assert old.leaving([raw], limit, large[0]) == fresh.leaving([raw], limit, large[1])
        assert old.arriving([raw]) == fresh.arriving([raw])
        assert old.lost == fresh.lost and large[0] == large[1]


def test_remembered_pairs_are_bounded() -> None:
    check = Gate(OWN, [ip_network("10.0.0.0/8")], Counter())
    for i in range(2 * MEMORY):
        packet = ipv4(str(ip_address("10.88.0.0") + i), "10.77.0.1")
        assert check.arriving([packet]) == [packet] == check.leaving([packet], 1500, [])
        assert max(len(check._in_pairs), len(check._out_pairs)) <= MEMORY


@given(st.integers(0, 3000), st.integers(68, 65535), st.sampled_from([0, 0x4000, 0x2000]))
def test_the_answer_to_a_large_ipv4_packet_is_a_valid_icmp_message(size: int, mtu: int, flags: int) -> None:
    packet = ipv4("192.168.1.5", "10.77.0.2", bytes(range(256)) * 12, flags=flags)[: 20 + size]
    packet = packet[:2] + len(packet).to_bytes(2, "big") + packet[4:]
    answer = too_big(packet, mtu)
    assert answer is not None and whole(answer) == answer and len(answer) <= 576
    assert checksum(answer[:20]) == 0 and checksum(answer[20:]) == 0
    assert answer[9] == 1 and answer[20:22] == b"\x03\x04"
    assert int.from_bytes(answer[26:28], "big") == mtu and answer[24:26] == b"\0\0"
    assert ip_address(answer[12:16]) == ip_address("10.77.0.2")
    assert ip_address(answer[16:20]) == ip_address("192.168.1.5")
    assert answer[28:] == packet[:548]


@given(st.integers(0, 3000), st.integers(431, 65535))
def test_the_answer_to_a_large_ipv6_packet_is_a_valid_icmpv6_message(size: int, mtu: int) -> None:
    packet = ipv6("fd88::5", "fd77::2", (bytes(range(255)) * 12)[:size])
    answer = too_big(packet, mtu)
    assert answer is not None and whole(answer) == answer and len(answer) <= 1280
    message = answer[40:]
    pseudo = answer[8:40] + len(message).to_bytes(4, "big") + bytes((0, 0, 0, 58))
    assert checksum(pseudo + message) == 0
    assert answer[6] == 58 and message[:2] == b"\x02\x00" and int.from_bytes(message[4:8], "big") == mtu
    assert answer[8:24] == packet[24:40] and answer[24:40] == packet[8:24]
    assert message[8:] == packet[:1232]


@pytest.mark.parametrize(
    "packet",
    [
        ipv4("10.77.0.1", "10.77.0.2", bytes(600), flags=0x00B9),  # a later fragment
        ipv4("10.77.0.1", "224.0.0.1", bytes(600)),
        ipv4("0.0.0.0", "10.77.0.2", bytes(600)),
        ipv4("10.77.0.1", "10.77.0.2", b"\x03\x01" + bytes(600), protocol=1),  # an error itself
        ipv6("fd77::1", "ff02::1", bytes(2000)),
        ipv6("::", "fd77::1", bytes(2000)),
        ipv6("fd77::1", "fd77::2", b"\x01\x00" + bytes(2000), protocol=58),
    ],
)
def test_what_must_not_be_answered_is_not(packet: bytes) -> None:
    assert too_big(packet, 431) is None


def test_an_echo_request_is_answered() -> None:
    assert too_big(ipv4("10.77.0.1", "10.77.0.2", b"\x08\x00" + bytes(600), protocol=1), 431) is not None
    assert too_big(ipv6("fd77::1", "fd77::2", b"\x80\x00" + bytes(2000), protocol=58), 1280) is not None


def test_answers_are_bounded_and_come_back_with_time() -> None:
    bucket = Bucket(rate=10, burst=5)
    assert [bucket.take(100.0) for _ in range(7)] == [True] * 5 + [False] * 2
    assert not bucket.take(100.05)
    assert bucket.take(100.2)
    assert [bucket.take(200.0) for _ in range(7)] == [True] * 5 + [False] * 2
