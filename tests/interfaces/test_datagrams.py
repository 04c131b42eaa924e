"""UDP over IP as bytes: what is built is right by plain arithmetic; what arrives gives a payload or a counter."""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rnsfast.interfaces.datagrams import Flow, Host, build_datagrams, receive
from rnsfast.wire.drop import Drop
from tests.osio.ip_packets import checksum, ip4, ip6, parse, pseudo, udp, udp4, udp6

NAMES = {4: ("10.77.0.2", "10.77.0.3", "10.77.0.4"), 6: ("fd77::2", "fd77::3", "fd77::4")}
HERE, THERE, ELSE = 0, 1, 2
VERSIONS = st.sampled_from([4, 6])


def address(version: int, who: int) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.ip_address(NAMES[version][who])


def host(version: int, *, anybody: bool = False, largest: int = 1080) -> Host:
    return Host(address(version, HERE), 4242, None if anybody else (address(version, THERE),), largest)


def flow(version: int, source: int = THERE, destination: int = HERE) -> Flow:
    return Flow(address(version, source), 4242, address(version, destination), 4242)


def datagram(version: int, payload: bytes, *, source: int = THERE, target: int = HERE, port: int = 4242) -> bytes:
    make = udp4 if version == 4 else udp6
    return make(NAMES[version][source], NAMES[version][target], 999, port, payload)


def fate(packet: bytes, version: int = 4, **options: bool | int) -> bytes | Drop | None:
    """What becomes of one packet; None if it was answered."""
    found = receive([packet], host(version, **options))  # type: ignore[arg-type]
    assert len(found.payloads) + len(found.answers) + found.drops.total() == 1
    if found.payloads:
        return found.payloads[0]
    return next(iter(found.drops), None)


# -- building -----------------------------------------------------------------------------------------------------


@given(VERSIONS, st.lists(st.binary(min_size=1, max_size=1200), min_size=1, max_size=5), st.integers(1, 3))
def test_datagrams_have_right_lengths_and_checksums(version: int, payloads: list[bytes], peers: int) -> None:
    first = address(version, THERE)
    targets = [first + i for i in range(peers)]
    flows = [Flow(address(version, HERE), 4242, target, 777) for target in targets]
    built = build_datagrams(payloads, flows)
    expected = [(payload, target.packed) for payload in payloads for target in targets]
    assert len(built) == len(expected)
    for packet, (payload, target) in zip(built, expected, strict=True):
        assert len(packet) == len(payload) + flows[0].overhead
        got = parse(packet)
        assert (got.payload, got.destination, got.source) == (payload, target, address(version, HERE).packed)
        assert (got.ports, got.protocol) == ((4242, 777), 17)
        if version == 4:
            assert (got.fragment, got.identifier) == (0x4000, 0), "no fragments, ever"


def test_a_checksum_that_comes_out_as_zero_is_sent_as_all_ones() -> None:
    for version in (4, 6):
        bare = flow(version).build(b"\0\0", 0)
        at = 20 if version == 4 else 40
        payload = bare[at + 6 : at + 8]  # makes the sum come out as zero
        built = build_datagrams([payload], [flow(version)])[0]
        assert built[at + 6 : at + 8] == b"\xff\xff"
        assert fate(built, version) == payload


def test_a_flow_stays_within_one_family() -> None:
    with pytest.raises(ValueError, match="family"):
        Flow(address(4, HERE), 1, address(6, THERE), 1)


@given(VERSIONS, st.lists(st.binary(min_size=1, max_size=1080), min_size=1, max_size=8))
def test_what_is_built_is_received(version: int, payloads: list[bytes]) -> None:
    found = receive(build_datagrams(payloads, [flow(version)]), host(version))
    assert (found.payloads, found.answers, found.drops) == (payloads, [], {})


# -- receiving ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [4, 6])
def test_who_and_where(version: int) -> None:
    assert fate(datagram(version, b"x"), version) == b"x"
    assert fate(datagram(version, b"x", source=ELSE), version) is Drop.IP_UNKNOWN_PEER
    assert fate(datagram(version, b"x", source=ELSE), version, anybody=True) == b"x"
    assert fate(datagram(version, b"x", target=ELSE), version) is Drop.IP_OTHER_ADDRESS
    assert fate(datagram(version, b"x", port=4243), version) is Drop.IP_OTHER_PORT
    assert fate(datagram(version, b""), version) is Drop.RX_REFUSED
    assert fate(datagram(version, bytes(1081)), version) is Drop.RX_REFUSED
    assert fate(datagram(version, bytes(1080)), version) == bytes(1080)
    assert fate(datagram(10 - version, b"x"), version) is Drop.IP_MALFORMED


def test_padding_behind_a_datagram_is_ignored() -> None:
    assert fate(datagram(4, b"abc") + bytes(20)) == b"abc"
    assert fate(datagram(6, b"abc") + bytes(20), 6) == b"abc"


def test_options_of_ipv4_are_passed_over() -> None:
    plain = datagram(4, b"abc")
    head = b"\x46" + plain[1:2] + struct.pack(">H", len(plain) + 4) + plain[4:10] + b"\0\0" + plain[12:20] + b"\1\1\1\0"
    head = head[:10] + struct.pack(">H", checksum(head)) + head[12:]
    assert fate(head + plain[20:]) == b"abc"


@pytest.mark.parametrize("bits", [0x2000, 0x0001, 0x2001, 0x6000])
def test_fragments_are_counted(bits: int) -> None:
    body = datagram(4, b"abc")[20:]
    assert fate(ip4(NAMES[4][THERE], NAMES[4][HERE], 17, body, fragment=bits)) is Drop.IP_FRAGMENT


def test_fragments_of_ipv6_are_counted() -> None:
    assert fate(ip6(NAMES[6][THERE], NAMES[6][HERE], 44, bytes(30)), 6) is Drop.IP_FRAGMENT


@pytest.mark.parametrize("version", [4, 6])
def test_other_protocols_are_counted(version: int) -> None:
    make = ip4 if version == 4 else ip6
    assert fate(make(NAMES[version][THERE], NAMES[version][HERE], 6, bytes(40)), version) is Drop.IP_PROTOCOL


def test_datagrams_without_checksum_are_for_ipv4_only() -> None:
    for version, expected in ((4, b"abc"), (6, Drop.IP_CHECKSUM)):
        packet = datagram(version, b"abc")
        at = (20 if version == 4 else 40) + 6
        assert fate(packet[:at] + b"\0\0" + packet[at + 2 :], version) == expected


CUTS: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda p: b"",
    "one byte": lambda p: p[:1],
    "header cut": lambda p: p[:19],
    "payload cut": lambda p: p[:-1],
    "header size too small": lambda p: b"\x44" + p[1:],
    "header size beyond the packet": lambda p: b"\x4f" + p[1:],
}


@pytest.mark.parametrize("what", CUTS)
def test_wrong_lengths_are_counted(what: str) -> None:
    assert fate(CUTS[what](datagram(4, b"abc"))) in (Drop.IP_MALFORMED, Drop.IP_CHECKSUM)


@pytest.mark.parametrize("size", [0, 7, 12, 65_535])
def test_wrong_lengths_of_udp_are_counted(size: int) -> None:
    for version in (4, 6):
        packet = datagram(version, b"abc")
        at = (20 if version == 4 else 40) + 4
        assert fate(packet[:at] + struct.pack(">H", size) + packet[at + 2 :], version) is Drop.IP_MALFORMED


@given(VERSIONS, st.binary(min_size=1, max_size=60), st.data())
def test_a_changed_bit_is_never_delivered(version: int, payload: bytes, data: st.DataObject) -> None:
    packet = bytearray(datagram(version, payload))
    # Nothing protects class, flow label and hop limit of IPv6; another UDP size may have the same checksum by chance.
    free = (0, 1, 2, 3, 7, 44, 45) if version == 6 else (24, 25)
    at = data.draw(st.integers(0, len(packet) - 1).filter(lambda place: place not in free))
    packet[at] ^= 1 << data.draw(st.integers(0, 7))
    checksum_at = 26 if version == 4 else 46
    assert isinstance(fate(bytes(packet), version), Drop) or packet[checksum_at : checksum_at + 2] == b"\0\0"


@given(VERSIONS, st.lists(st.binary(max_size=80), max_size=5), st.binary(max_size=60), st.integers(0, 60))
def test_nothing_raises_and_nothing_is_lost_count_of(version: int, junk: list[bytes], patch: bytes, at: int) -> None:
    good = datagram(version, bytes(50))
    packets = [*junk, good[:at] + patch + good[at + len(patch) :]]
    found = receive(packets, host(version, anybody=True))
    assert len(found.payloads) + len(found.answers) + found.drops.total() == len(packets)


def test_one_bad_packet_costs_itself() -> None:
    found = receive([datagram(4, b"a"), b"", datagram(4, b"b"), datagram(4, b"c", port=1)], host(4))
    assert found.payloads == [b"a", b"b"]
    assert found.drops == {Drop.IP_MALFORMED: 1, Drop.IP_OTHER_PORT: 1}


# -- ICMP ---------------------------------------------------------------------------------------------------------


def icmp(version: int, kind: int, code: int, rest: bytes, *, source: int = ELSE) -> bytes:
    left, right = NAMES[version][source], NAMES[version][HERE]
    bare = bytes((kind, code, 0, 0)) + rest
    if version == 4:
        return ip4(left, right, 1, bare[:2] + struct.pack(">H", checksum(bare)) + bare[4:])
    over = pseudo(address(6, source).packed, address(6, HERE).packed, 58, len(bare))
    return ip6(left, right, 58, bare[:2] + struct.pack(">H", checksum(over + bare)) + bare[4:])


@given(VERSIONS, st.binary(max_size=200))
def test_echo_requests_are_answered(version: int, data: bytes) -> None:
    request, answer = (8, 0) if version == 4 else (128, 129)
    rest = b"\x12\x34\0\1" + data
    found = receive([icmp(version, request, 0, rest)], host(version))
    assert (found.payloads, found.drops, len(found.answers)) == ([], {}, 1)
    packet = found.answers[0]
    body = packet[20 if version == 4 else 40 :]
    if version == 4:
        assert checksum(packet[:20]) == checksum(body) == 0
        assert (packet[12:16], packet[16:20]) == (address(4, HERE).packed, address(4, ELSE).packed)
        assert struct.unpack(">H", packet[2:4])[0] == len(packet)
    else:
        assert (packet[8:24], packet[24:40]) == (address(6, HERE).packed, address(6, ELSE).packed)
        assert checksum(pseudo(packet[8:24], packet[24:40], 58, len(body)) + body) == 0
        assert struct.unpack(">H", packet[4:6])[0] == len(body)
    assert (body[0], body[1], body[4:]) == (answer, 0, rest)


def test_echo_requests_of_groups_are_not_answered() -> None:
    for source in ("224.0.0.1", "255.255.255.255"):
        message = bytes((8, 0)) + struct.pack(">H", checksum(bytes((8, 0, 0, 0, 0, 0, 0, 0)))) + bytes(4)
        assert fate(ip4(source, NAMES[4][HERE], 1, message)) is Drop.IP_MALFORMED


def quoted(version: int, *, port: int = 4242) -> bytes:
    """The beginning of a datagram we have sent."""
    left, right = address(version, HERE), address(version, THERE)
    body = udp(left.packed, right.packed, port, 4242, bytes(100))
    whole = ip4(str(left), str(right), 17, body) if version == 4 else ip6(str(left), str(right), 17, body)
    return whole[: 28 if version == 4 else 60]


@pytest.mark.parametrize(
    ("version", "kind", "code", "expected"),
    [
        (4, 3, 4, Drop.ICMP_TOO_BIG),
        (4, 3, 1, Drop.ICMP_UNREACHABLE),
        (4, 3, 3, Drop.ICMP_UNREACHABLE),
        (4, 11, 0, Drop.ICMP_OTHER),
        (6, 2, 0, Drop.ICMP_TOO_BIG),
        (6, 1, 4, Drop.ICMP_UNREACHABLE),
        (6, 3, 0, Drop.ICMP_OTHER),
    ],
)
def test_errors_about_our_datagrams_are_counted_by_kind(version: int, kind: int, code: int, expected: Drop) -> None:
    assert fate(icmp(version, kind, code, bytes(4) + quoted(version)), version) is expected
    foreign = icmp(version, kind, code, bytes(4) + quoted(version, port=5))
    assert fate(foreign, version) is Drop.ICMP_OTHER
    for size in range(0, len(quoted(version)), 7):
        assert fate(icmp(version, kind, code, bytes(4) + quoted(version)[:size]), version) in (
            Drop.ICMP_OTHER,
            expected,
        )


def test_damaged_icmp_is_counted() -> None:
    packet = icmp(4, 8, 0, b"\0\1\0\1abcd")
    assert fate(packet[:-1] + b"x") is Drop.IP_CHECKSUM
    assert fate(ip4(NAMES[4][ELSE], NAMES[4][HERE], 1, b"\x08\0")) is Drop.IP_MALFORMED
