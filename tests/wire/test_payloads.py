"""Announces, path requests, tunnels, proofs: what the vectors of whole packets do not reach."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rnsfast.crypto.ed25519 import VerifyKey
from rnsfast.crypto.hashes import full
from rnsfast.crypto.identity import Identity
from rnsfast.wire import packet as p
from rnsfast.wire.announce import Announce, build_announce, emission_time, parse_announce, random_blob, signed_data
from rnsfast.wire.drop import Drop
from rnsfast.wire.packet import Packet
from rnsfast.wire.pathrequest import PATH_REQUEST_DESTINATION, PathRequest, build_path_request, parse_path_request
from rnsfast.wire.proof import PacketProof, link_proof_packet, parse_proof, parse_proof_on_link, proof_packet
from rnsfast.wire.tunnel import (
    TUNNEL_DESTINATION,
    Synthesis,
    build_synthesis,
    parse_synthesis,
    synthesis_signed_data,
    tunnel_id,
)
from tests.vectors_support import Case, by_name, unhex, vectors

PROOFS = vectors("wire", "proofs")


def announce_packet(data: bytes, flags: int = p.ANNOUNCE) -> Packet:
    return Packet(flags, 0, None, b"d" * 16, 0, data)


@pytest.mark.parametrize(("flags", "least"), [(0x01, 148), (0x21, 180)])
def test_announce_sizes(flags: int, least: int) -> None:
    assert parse_announce(announce_packet(bytes(least - 1), flags)) is Drop.ANNOUNCE_SIZE
    assert isinstance(parse_announce(announce_packet(bytes(least), flags)), Announce)


def test_absent_app_data_is_none_without_ratchet_and_empty_with_one() -> None:
    without, with_ratchet = (parse_announce(announce_packet(bytes(n), f)) for n, f in ((148, 0x01), (180, 0x21)))
    assert isinstance(without, Announce) and isinstance(with_ratchet, Announce)
    assert without.app_data is None and without.ratchet is None
    assert with_ratchet.app_data == b"" and with_ratchet.ratchet == bytes(32)


@given(st.binary(max_size=400), st.booleans())
def test_announces_build_back(data: bytes, ratchet: bool) -> None:
    packet = announce_packet(data, 0x21 if ratchet else 0x01)
    announce = parse_announce(packet)
    if isinstance(announce, Announce):
        assert build_announce(announce) == data
        at = 116 if ratchet else 84
        assert signed_data(announce) == packet.destination + data[:at] + data[at + 64 :]


@given(st.one_of(st.none(), st.binary(min_size=32, max_size=32)), st.binary(max_size=50))
def test_a_signed_announce_verifies_and_a_changed_one_does_not(ratchet: bytes | None, app_data: bytes) -> None:
    identity = Identity()
    announce = Announce(b"d" * 16, identity.public_key, b"n" * 10, random_blob(b"r" * 5, 1.0), ratchet, b"", app_data)
    data = build_announce(announce, identity.sign(signed_data(announce)))
    found = parse_announce(announce_packet(data, 0x21 if ratchet else 0x01))
    assert isinstance(found, Announce) and identity.verify(found.signature, signed_data(found))
    changed = parse_announce(announce_packet(data + b"x", 0x21 if ratchet else 0x01))
    assert isinstance(changed, Announce) and not identity.verify(changed.signature, signed_data(changed))


def test_announces_of_wrong_sizes_are_not_built() -> None:
    good = Announce(b"d" * 16, bytes(64), bytes(10), bytes(10), None, bytes(64), None)
    assert len(build_announce(good)) == 148
    for bad in (
        Announce(b"d" * 16, bytes(63), bytes(10), bytes(10), None, bytes(64), None),
        Announce(b"d" * 16, bytes(64), bytes(16), bytes(10), None, bytes(64), None),
        Announce(b"d" * 16, bytes(64), bytes(10), bytes(9), None, bytes(64), None),
        Announce(b"d" * 16, bytes(64), bytes(10), bytes(10), bytes(31), bytes(64), None),
        Announce(b"d" * 16, bytes(64), bytes(10), bytes(10), None, b"", None),
    ):
        with pytest.raises(ValueError, match="sizes"):
            build_announce(bad)


@pytest.mark.parametrize(
    ("time", "whole"), [(0, 0), (1.9, 1), (-5, 0), (2**40 + 9, 2**40 - 1), (1704427550.7, 1704427550)]
)
def test_emission_times_are_whole_seconds(time: float, whole: int) -> None:
    blob = random_blob(b"12345", time)
    assert blob[:5] == b"12345" and emission_time(blob) == whole


def test_random_blobs_take_five_bytes() -> None:
    with pytest.raises(ValueError, match="5 random bytes"):
        random_blob(b"1234", 0)


def test_path_request_destination() -> None:
    assert PATH_REQUEST_DESTINATION.hex() == "6b9f66014d9853faab220fba47d02761"


@pytest.mark.parametrize("size", [0, 15, 16])
def test_path_requests_without_tag_are_dropped(size: int) -> None:
    assert parse_path_request(bytes(size)) is Drop.PATH_REQUEST_SIZE


def test_path_requests_tell_by_length_whether_there_is_a_transport_id() -> None:
    assert parse_path_request(b"d" * 16 + b"t" * 16) == PathRequest(b"d" * 16, None, b"t" * 16)
    assert parse_path_request(b"d" * 16 + b"t" * 17) == PathRequest(b"d" * 16, b"t" * 16, b"t")


@given(st.binary(max_size=100))
def test_path_requests_build_back(data: bytes) -> None:
    request = parse_path_request(data)
    if isinstance(request, PathRequest):
        assert build_path_request(request) == data


@pytest.mark.parametrize(
    "request_",
    [
        PathRequest(bytes(15), None, b"t"),
        PathRequest(bytes(16), bytes(15), b"t"),
        PathRequest(bytes(16), None, b""),
        PathRequest(bytes(16), bytes(16), b""),
        PathRequest(bytes(16), None, bytes(17)),
    ],
)
def test_path_requests_that_would_read_back_differently_are_not_built(request_: PathRequest) -> None:
    with pytest.raises(ValueError, match=r"16 bytes|tag"):
        build_path_request(request_)


def test_tunnels() -> None:
    assert TUNNEL_DESTINATION.hex() == "91bf0910267b59b0e864e0d4c91602ca"
    identity = Identity()
    signed = synthesis_signed_data(identity.public_key, b"i" * 32, b"r" * 16)
    synthesis = Synthesis(identity.public_key, b"i" * 32, b"r" * 16, identity.sign(signed))
    data = build_synthesis(synthesis)
    assert len(data) == 176 and data[:112] == signed and parse_synthesis(data) == synthesis
    assert tunnel_id(identity.public_key, b"i" * 32) == full(data[:96])
    for wrong in (data[:-1], data + b"x", b""):
        assert parse_synthesis(wrong) is Drop.TUNNEL_SIZE
    with pytest.raises(ValueError, match="sizes"):
        synthesis_signed_data(bytes(32), bytes(32), bytes(16))
    with pytest.raises(ValueError, match="signature"):
        build_synthesis(Synthesis(bytes(64), bytes(32), bytes(16), b""))


@pytest.mark.parametrize("case", [c for c in PROOFS["prove"] if c["proof"]])
def test_proof_packets_are_those_of_the_reference(case: Case) -> None:
    identity = Identity.from_private(unhex(case["prover_private_key"]))
    h = p.packet_hash(unhex(case["packet"]))
    assert h.hex() == case["packet_hash"]
    raw = proof_packet(h, identity.sign(h), explicit=not case["implicit"])
    proof = case["proof"]
    assert raw.hex() == proof["raw"]
    found = parse_proof(unhex(proof["data"]))
    assert isinstance(found, PacketProof) and found.signature == identity.sign(h)
    assert found.packet_hash == (None if case["implicit"] else h)


def holds(found: PacketProof | Drop, packet_hash: bytes, verify) -> bool:
    return (
        isinstance(found, PacketProof)
        and found.packet_hash in (None, packet_hash)
        and verify(found.signature, packet_hash)
    )


@pytest.mark.parametrize("case", PROOFS["validate"], ids=by_name)
def test_proofs_hold_as_for_the_reference(case: Case) -> None:
    verify = Identity.from_public(unhex(case["peer_public_key"])).verify
    assert holds(parse_proof(unhex(case["proof_data"])), unhex(case["packet_hash"]), verify) is case["valid"]


@pytest.mark.parametrize("link", PROOFS["link"], ids=by_name)
def test_proofs_on_links_hold_as_for_the_reference(link: Case) -> None:
    h = unhex(link["packet_hash"])
    assert p.packet_hash(unhex(link["packet"])) == h
    verify = VerifyKey(unhex(link["prover_signing_public"])).verify
    found = parse_proof_on_link(unhex(link["proof"]["data"]))
    assert isinstance(found, PacketProof) and verify(found.signature, h)
    assert link_proof_packet(unhex(link["link_id"]), h, found.signature).hex() == link["proof"]["raw"]
    for case in link["validate"]:
        assert holds(parse_proof_on_link(unhex(case["proof_data"])), h, verify) is case["valid"], case["name"]


@given(st.binary(max_size=200))
def test_proofs_go_by_length_alone(data: bytes) -> None:
    assert isinstance(parse_proof(data), PacketProof) is (len(data) in (64, 96))
    assert isinstance(parse_proof_on_link(data), PacketProof) is (len(data) >= 96)
