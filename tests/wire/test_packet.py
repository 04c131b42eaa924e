from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rnsfast.crypto.hashes import full
from rnsfast.wire import packet as p
from rnsfast.wire.drop import Drop
from rnsfast.wire.packet import (
    Packet,
    build_packet,
    hashable_part,
    link_id,
    link_mdu,
    make_raw,
    packet_hash,
    parse_packet,
)
from tests.vectors_support import Case, by_name, maybe, unhex, vectors

CONSTANTS = vectors("wire", "constants")
PACKETS = vectors("wire", "packets")
EQUAL = vectors("wire", "hash_equivalence")


def check(case: Case) -> Packet:
    """All fields of a packet object of the vectors, its hashes, and the same bytes again."""
    raw = unhex(case["raw"])
    packet = parse_packet(raw)
    assert isinstance(packet, Packet)
    flags = packet.flags
    assert flags == case["flags"] and packet.hops == case["hops"]
    assert bool(flags & p.HEADER_2) == case["header_type"]
    assert bool(flags & p.CONTEXT_FLAG) == case["context_flag"]
    assert bool(flags & p.TRANSPORT) == case["transport_type"]
    assert (flags & p.DESTINATION_TYPE_MASK) >> 2 == case["destination_type"]
    assert flags & p.PACKET_TYPE_MASK == case["packet_type"]
    assert packet.transport_id == maybe(case["transport_id"])
    assert packet.destination.hex() == case["destination_hash"]
    assert packet.context == case["context"]
    assert packet.data.hex() == case.get("data", case["raw"][38:])  # left out where it is long
    assert build_packet(packet) == raw
    if packet.transport_id is None:
        assert make_raw(flags, packet.destination, packet.context, packet.data, packet.hops) == raw
    assert packet_hash(raw).hex() == case["packet_hash"]
    assert packet_hash(raw)[:16].hex() == case["truncated_hash"]
    return packet


def test_numbers_are_those_of_the_reference() -> None:
    c = CONSTANTS
    assert c["packet_types"] == {"DATA": p.DATA, "ANNOUNCE": p.ANNOUNCE, "LINKREQUEST": p.LINKREQUEST, "PROOF": p.PROOF}
    assert c["destination_types"] == {"SINGLE": p.SINGLE, "GROUP": p.GROUP, "PLAIN": p.PLAIN, "LINK": p.LINK}
    assert {name: getattr(p, f"CTX_{name}") for name in c["contexts"]} == c["contexts"]
    assert (
        tuple(c[n] for n in ("mtu", "header_minsize", "header_maxsize", "ifac_min_size", "mdu", "encrypted_mdu"))
        + (c["link_mdu"],)
    ) == (p.MTU, p.HEADER_1_SIZE, p.HEADER_2_SIZE, p.IFAC_MIN_SIZE, p.PLAIN_MDU, p.ENCRYPTED_MDU, p.LINK_MDU)
    assert c["plain_mdu"] == p.PLAIN_MDU and c["max_hops"] == p.MAX_HOPS and c["token_overhead"] == p.TOKEN_OVERHEAD
    assert c["explicit_proof_length"] == p.EXPLICIT_PROOF_SIZE and c["implicit_proof_length"] == p.IMPLICIT_PROOF_SIZE


@pytest.mark.parametrize("row", vectors("wire", "flags"), ids=lambda row: f"{row[0]:#04x}")
def test_flag_bits(row: list[int]) -> None:
    byte, ifac, header, context, transport, destination, packet_type = row
    assert bool(byte & p.IFAC_FLAG) == ifac
    assert bool(byte & p.HEADER_2) == header
    assert bool(byte & p.CONTEXT_FLAG) == context
    assert bool(byte & p.TRANSPORT) == transport
    assert (byte & p.DESTINATION_TYPE_MASK) >> 2 == destination
    assert byte & p.PACKET_TYPE_MASK == packet_type


@pytest.mark.parametrize("case", PACKETS, ids=by_name)
def test_packets_of_the_reference_read_and_build(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", vectors("wire", "unpack"), ids=by_name)
def test_packet_reads_as_the_reference_reads_it(case: Case) -> None:
    if case["valid"]:
        check(case)
    else:
        assert isinstance(parse_packet(unhex(case["raw"])), Drop)


@pytest.mark.parametrize("case", EQUAL["same"] + EQUAL["different"], ids=by_name)
def test_hash_is_of_what_stays_the_same(case: Case) -> None:
    raw = unhex(case["raw"])
    assert packet_hash(raw).hex() == case["packet_hash"]
    same = case in EQUAL["same"]
    assert (packet_hash(raw).hex() == EQUAL["packet_hash"]) is same
    assert (hashable_part(raw).hex() == EQUAL["hashable_part"]) is same
    assert full(hashable_part(raw)) == packet_hash(raw)


def test_the_hash_ignores_all_high_flag_bits_hops_and_transport_id() -> None:
    body = b"d" * 16 + b"\x00" + b"data"
    raws = [bytes((high << 4 | 0x0C, hops)) + body for high in range(16) if not high & 4 for hops in (0, 7, 127)]
    raws += [bytes((high << 4 | 0x0C, 3)) + b"t" * 16 + body for high in range(16) if high & 4]
    assert len({packet_hash(raw) for raw in raws}) == 1


@pytest.mark.parametrize("case", vectors("wire", "pack_limits", "link_mdu"), ids=lambda c: str(c["link_mtu"]))
def test_link_mdu(case: Case) -> None:
    assert link_mdu(case["link_mtu"]) == case["link_mdu"]


@pytest.mark.parametrize("case", vectors("wire", "pack_limits", "pack"))
def test_payloads_within_the_mdu_fit_and_the_reference_agrees_on_sizes(case: Case) -> None:
    payload, kind = case["payload"], case["destination"]
    sealed = payload if kind == "PLAIN" else 48 + 16 * (payload // 16 + 1) + (32 if kind == "SINGLE" else 0)
    size = len(make_raw(0, bytes(16), 0, bytes(sealed)))
    assert (size if size <= p.MTU else None) == case["packet_size"]
    mdu = {"PLAIN": p.PLAIN_MDU, "SINGLE": p.ENCRYPTED_MDU, "GROUP": p.ENCRYPTED_MDU, "LINK": p.LINK_MDU}[kind]
    if payload <= mdu:
        assert case["packet_size"] is not None


@pytest.mark.parametrize(
    ("raw", "drop"),
    [
        (b"", Drop.TOO_SHORT),
        (b"\x00", Drop.TOO_SHORT),
        (b"\x00\x80" + bytes(30), Drop.TOO_MANY_HOPS),
        (b"\x00\xff", Drop.TOO_MANY_HOPS),
        (b"\x00\x00", Drop.TOO_SHORT),
        (bytes(18), Drop.TOO_SHORT),
        (bytes(19), Drop.NO_DATA),
        (b"\x40" + bytes(19), Drop.TOO_SHORT),
        (b"\x40" + bytes(33), Drop.TOO_SHORT),
        (b"\x40" + bytes(34), Drop.NO_DATA),
    ],
)
def test_what_is_wrong_has_a_name(raw: bytes, drop: Drop) -> None:
    assert parse_packet(raw) is drop


@pytest.mark.parametrize(
    "packet",
    [
        Packet(0x40, 0, None, bytes(16), 0, b"x"),
        Packet(0x00, 0, bytes(16), bytes(16), 0, b"x"),
        Packet(0x00, 128, None, bytes(16), 0, b"x"),
        Packet(0x00, -1, None, bytes(16), 0, b"x"),
        Packet(0x00, 0, None, bytes(15), 0, b"x"),
        Packet(0x40, 0, bytes(17), bytes(16), 0, b"x"),
    ],
)
def test_packets_that_cannot_be_are_not_built(packet: Packet) -> None:
    with pytest.raises(ValueError, match=r"disagree|hops|16 bytes"):
        build_packet(packet)


@given(st.binary(max_size=600))
def test_whatever_parses_builds_back_to_the_same_bytes(raw: bytes) -> None:
    packet = parse_packet(raw)
    if isinstance(packet, Packet):
        assert build_packet(packet) == raw
        assert len(packet_hash(raw)) == 32 and len(link_id(raw)) == 16


@given(st.binary(min_size=64, max_size=64), st.integers(0, 127), st.binary(max_size=3))
def test_the_link_id_ignores_signalling_and_route(keys: bytes, hops: int, signalling: bytes) -> None:
    plain = make_raw(p.LINKREQUEST, b"d" * 16, 0, keys)
    via = bytes((p.HEADER_2 | p.TRANSPORT | p.LINKREQUEST, hops)) + b"t" * 16 + plain[2:] + signalling
    assert link_id(via) == link_id(plain + signalling) == link_id(plain)


def test_link_id_of_a_vector() -> None:
    case = next(case for case in PACKETS if "link_id" in case)
    assert link_id(unhex(case["raw"])).hex() == case["link_id"]


def test_packets_are_values() -> None:
    raw = make_raw(0, b"d" * 16, 0, b"x")
    assert parse_packet(raw) == parse_packet(raw) and len({parse_packet(raw), parse_packet(raw)}) == 1
    assert not hasattr(parse_packet(raw), "__dict__")
