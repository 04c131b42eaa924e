from __future__ import annotations

import math
import struct

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rnsfast.crypto.ed25519 import SigningKey, VerifyKey
from rnsfast.crypto.hashes import truncated
from rnsfast.crypto.hkdf import hkdf
from rnsfast.crypto.identity import Identity
from rnsfast.crypto.token import TokenKey, seal_with_iv
from rnsfast.crypto.x25519 import X25519Key
from rnsfast.wire import handshake as hs
from rnsfast.wire import packet as p
from rnsfast.wire.drop import Drop
from rnsfast.wire.mtu import hw_mtu_for_bitrate
from rnsfast.wire.names import destination_hash, name_hash
from rnsfast.wire.packet import Packet, make_raw, packet_hash, parse_packet
from rnsfast.wire.proof import link_proof_packet
from tests.vectors_support import Case, by_name, unhex, vectors

SIGNALLING = vectors("link", "signalling")
HANDSHAKES = [case for case in vectors("link", "handshakes") if "keys" in case]
STEPS = [
    pytest.param(case, step, id=f"{case['name']}-{step['name']}") for case in HANDSHAKES for step in case["transcript"]
]
TRANSPORTED = next(case for case in vectors("link", "handshakes") if "in_transport" in case)
NEGATIVE = vectors("link", "negative")
REQUESTS = vectors("link", "requests")


def parsed(raw: bytes) -> Packet:
    packet = parse_packet(raw)
    assert isinstance(packet, Packet)
    return packet


def test_numbers_are_those_of_the_reference() -> None:
    c = vectors("link", "constants")
    assert list(hs.REQUEST_SIZES) == c["request_payload"] and list(hs.PROOF_SIZES) == c["proof_payload"]
    assert c["signalling_size"] == hs.SIGNALLING_SIZE and c["mtu_mask"] == hs.MTU_MASK
    assert c["mode_shift"] == hs.MODE_SHIFT - 16 and c["mode_aes256_cbc"] == hs.MODE_AES256_CBC


@pytest.mark.parametrize("case", SIGNALLING["encode"], ids=lambda c: str(c["mtu"]))
def test_signalling(case: Case) -> None:
    assert hs.decode_signalling(unhex(case["bytes"])) == (case["decoded_mtu"], case["mode"])
    if case["mtu"] <= hs.MTU_MASK:
        assert hs.encode_signalling(case["mtu"], case["mode"]).hex() == case["bytes"]
    else:  # the reference wraps in silence; for us it is a mistake
        with pytest.raises(ValueError, match="21"):
            hs.encode_signalling(case["mtu"], case["mode"])


@pytest.mark.parametrize("case", SIGNALLING["disabled_modes"], ids=lambda c: str(c["mode"]))
def test_disabled_modes_are_expressed_and_read_but_not_asked_for(case: Case) -> None:
    assert hs.encode_signalling(case["mtu"], case["mode"]).hex() == case["wire_form"]
    assert hs.decode_signalling(unhex(case["wire_form"])) == (case["mtu"], case["mode"])
    assert case["reference_send"] == "refused" and case["mode"] not in hs.ENABLED_MODES
    with pytest.raises(ValueError, match="not enabled"):
        hs.build_link_request(hs.LinkRequest(bytes(32), bytes(32), case["mtu"], case["mode"]))


@pytest.mark.parametrize("case", SIGNALLING["mdu"], ids=lambda c: str(c["mtu"]))
def test_mdu(case: Case) -> None:
    assert p.link_mdu(case["mtu"]) == case["mdu"]
    assert case["mtu"] - p.HEADER_2_SIZE - p.IFAC_MIN_SIZE == case["resource_sdu"]


@pytest.mark.parametrize("case", vectors("link", "autoconfigured_mtu"), ids=lambda c: str(c["bitrate"]))
def test_hardware_mtu_by_bitrate(case: Case) -> None:
    assert hw_mtu_for_bitrate(case["bitrate"]) == case["hw_mtu"]


@pytest.mark.parametrize("case", HANDSHAKES, ids=by_name)
def test_handshakes_are_made_of_the_same_keys(case: Case) -> None:
    keys = {name: unhex(text) for name, text in case["keys"].items() if name != "destination_name"}
    identity = Identity.from_private(keys["responder_identity_private"])
    assert identity.public_key == keys["responder_identity_public"]
    address = destination_hash(name_hash(*case["keys"]["destination_name"].split(".")), identity.hash)
    assert address == keys["destination_hash"]
    initiator, signing = X25519Key(keys["initiator_x25519_private"]), SigningKey(keys["initiator_ed25519_private"])
    responder = X25519Key(keys["responder_x25519_private"])
    assert initiator.public == keys["initiator_x25519_public"]
    assert signing.public == keys["initiator_ed25519_public"]
    assert responder.public == keys["responder_x25519_public"]
    shared = initiator.exchange(responder.public)
    assert shared == responder.exchange(initiator.public) == keys["shared_secret"]

    mtu, mode = hs.decode_signalling(unhex(case["request_signalling"]))
    sent = make_raw(
        p.LINKREQUEST, address, 0, hs.build_link_request(hs.LinkRequest(initiator.public, signing.public, mtu, mode))
    )
    assert sent.hex() == case["request_sent"]
    assert sent[19:].hex() == case["request_payload"] and sent[19 + 64 :].hex() == case["request_signalling"]
    received = unhex(case["request_received"])
    request = hs.parse_link_request(parsed(received).data)
    assert isinstance(request, hs.LinkRequest)
    assert (request.x25519, request.ed25519) == (initiator.public, signing.public)
    if len(received) == 19 + 64:
        assert request.mtu is None and request.mode == hs.MODE_AES256_CBC
    else:
        assert hs.encode_signalling(request.mtu or 0, request.mode) == received[-3:]
    link_id = p.link_id(sent)
    assert link_id == p.link_id(received) == truncated(unhex(case["link_id_hash_input"])) == unhex(case["link_id"])
    assert link_id == keys["hkdf_salt"]
    assert hkdf(64, shared, link_id, keys["hkdf_info"]) == keys["derived_key"]
    assert keys["derived_key"] == keys["hmac_key"] + keys["aes_key"]

    signalling = unhex(case["proof_signalling"])
    signed = hs.link_proof_signed_data(link_id, responder.public, identity.public_key[32:], signalling)
    assert signed.hex() == case["proof_signed_data"]
    signature = identity.sign(signed)
    assert signature.hex() == case["proof_signature"]
    raw = make_raw(0x0F, link_id, p.CTX_LRPROOF, hs.build_link_proof(signature, responder.public, signalling))
    assert raw.hex() == case["proof"]
    proof = hs.parse_link_proof(parsed(raw).data)
    assert isinstance(proof, hs.LinkProof)
    assert (proof.signature, proof.x25519, proof.signalling) == (signature, responder.public, signalling)
    assert (proof.mtu or p.MTU) == case["initiator"]["mtu"] and proof.mode == case["initiator"]["mode"]
    for end in (case["initiator"], case["responder"]):
        assert p.link_mdu(end["mtu"]) == end["mdu"]


def rebuilt(case: Case, step: Case) -> bytes:
    """The packet of one step of a transcript, from keys, IVs and plaintexts alone."""
    keys, link_id, context = case["keys"], unhex(case["link_id"]), step["context"]
    if step["packet_type"] == "LINKREQUEST":
        # Rebuilt in the test above, as is the proof; here with what a relay made of the signalling bytes.
        sent, received = unhex(case["request_sent"]), unhex(case["request_received"])
        return sent[: 19 + 64] + received[19 + 64 :]
    if context == p.CTX_LRPROOF:
        return unhex(case["proof"])
    if step["packet_type"] == "PROOF":
        seed = keys["responder_identity_private"][64:] if step["dir"] == "r2i" else keys["initiator_ed25519_private"]
        proved = unhex(step["payload"])[:32]
        return link_proof_packet(link_id, proved, SigningKey(unhex(seed)).sign(proved))
    if context == p.CTX_KEEPALIVE:
        return make_raw(0x0C, link_id, context, b"\xff" if step["dir"] == "i2r" else b"\xfe")
    plain = unhex(step["plaintext"])
    if context == p.CTX_LRRTT:
        assert hs.build_rtt(step["rtt"]) == plain and hs.parse_rtt(plain) == step["rtt"]
    if context == p.CTX_LINKIDENTIFY:
        identity = Identity.from_private(unhex(step["identity_private"]))
        assert identity.hash.hex() == step["identity_hash"]
        signed = hs.identify_signed_data(link_id, identity.public_key)
        assert signed.hex() == step["signed_data"]
        plain = hs.build_identify(identity.public_key, identity.sign(signed))
    if context == p.CTX_LINKCLOSE:
        plain = link_id
    return make_raw(0x0C, link_id, context, seal_with_iv(unhex(keys["derived_key"]), unhex(step["iv"]), plain))


@pytest.mark.parametrize(("case", "step"), STEPS)
def test_every_packet_of_the_transcripts_is_rebuilt_byte_for_byte(case: Case, step: Case) -> None:
    raw = unhex(step["raw"])
    assert rebuilt(case, step) == raw
    packet = parsed(raw)
    assert len(raw) == step["size"] and packet_hash(raw).hex() == step["packet_hash"]
    assert (packet.flags, packet.hops, packet.context) == (step["flags"], step["hops"], step["context"])
    assert packet.destination.hex() == step["destination"] and packet.data.hex() == step["payload"]
    assert packet.transport_id is None and step["transport_id"] is None
    if "plaintext" in step:
        assert step["encrypted"]
        assert TokenKey(unhex(case["keys"]["derived_key"])).open(packet.data) == unhex(step["plaintext"])


def test_transport_does_not_enter_the_link_id() -> None:
    plain, via = unhex(TRANSPORTED["plain"]), unhex(TRANSPORTED["in_transport"])
    assert p.link_id(plain) == p.link_id(via) == unhex(TRANSPORTED["link_id"])
    assert truncated(unhex(TRANSPORTED["link_id_hash_input"])) == unhex(TRANSPORTED["link_id"])


@pytest.mark.parametrize("case", REQUESTS["cases"], ids=by_name)
def test_request_and_response_packets_are_rebuilt(case: Case) -> None:
    key, link_id = unhex(REQUESTS["derived_key"]), unhex(REQUESTS["link_id"])
    steps = [step for step in (case.get("request"), case.get("response")) if step and "iv" in step]
    for step in steps:
        sealed = seal_with_iv(key, unhex(step["iv"]), unhex(step["plaintext"]))
        raw = make_raw(0x0C, link_id, step["context"], sealed)
        assert raw.hex() == step["raw"] and packet_hash(raw).hex() == step["packet_hash"]


@pytest.mark.parametrize("case", [c for c in NEGATIVE if c["name"].startswith("request_")], ids=by_name)
def test_requests_that_are_dropped_for_their_bytes_alone(case: Case) -> None:
    request = hs.parse_link_request(parsed(unhex(case["raw"])).data)
    if case["name"] in ("request_too_short", "request_65_bytes", "request_68_bytes"):
        assert request is Drop.LINK_REQUEST_SIZE
        return
    assert isinstance(request, hs.LinkRequest)
    assert (request.mode in hs.ENABLED_MODES) is not case["name"].startswith("request_mode")
    usable = X25519Key(bytes(range(32))).exchange(request.x25519) is not None
    assert usable is (case["name"] != "request_low_order_key")
    if case["name"].startswith("request_mtu_") and case["name"][12:].isdigit():
        assert request.mtu == int(case["name"][12:])


@pytest.mark.parametrize("case", [c for c in NEGATIVE if c["name"].startswith("proof_")], ids=by_name)
def test_proofs_that_are_dropped_for_their_bytes_alone(case: Case) -> None:
    packet = parsed(unhex(case["raw"]))
    proof = hs.parse_link_proof(packet.data)
    if case["name"] in ("proof_too_long", "proof_too_short"):
        assert proof is Drop.LINK_PROOF_SIZE
        return
    assert isinstance(proof, hs.LinkProof)
    known = [unhex(value)[-32:] for name, value in case.items() if name.endswith("identity_public")]
    assert len(known) == 1, sorted(case)
    signed = hs.link_proof_signed_data(p.link_id(unhex(case["request"])), proof.x25519, known[0], proof.signalling)
    verified = VerifyKey(known[0]).verify(proof.signature, signed) and proof.mode in hs.ENABLED_MODES
    verified = verified and packet.destination == p.link_id(unhex(case["request"]))
    assert verified is (case["expect"] == "accept")


@pytest.mark.parametrize("size", [*range(64), 65, 66, 68, 96, 99, 128])
def test_link_requests_of_other_sizes(size: int) -> None:
    assert hs.parse_link_request(bytes(size)) is Drop.LINK_REQUEST_SIZE


@given(st.binary(max_size=110))
def test_whatever_parses_builds_back(data: bytes) -> None:
    proof = hs.parse_link_proof(data)
    if isinstance(proof, hs.LinkProof):
        assert hs.build_link_proof(proof.signature, proof.x25519, proof.signalling) == data
    request = hs.parse_link_request(data)
    if isinstance(request, hs.LinkRequest) and request.mode in hs.ENABLED_MODES:
        assert hs.build_link_request(request) == data


@given(st.binary(min_size=64, max_size=64), st.one_of(st.none(), st.integers(0, hs.MTU_MASK)))
def test_requests_read_back(keys: bytes, mtu: int | None) -> None:
    request = hs.LinkRequest(keys[:32], keys[32:], mtu, 1)
    assert hs.parse_link_request(hs.build_link_request(request)) == request


def test_wrong_sizes_are_not_built() -> None:
    for build in (
        lambda: hs.build_link_request(hs.LinkRequest(bytes(31), bytes(32), None, 1)),
        lambda: hs.build_link_proof(bytes(63), bytes(32), b""),
        lambda: hs.build_link_proof(bytes(64), bytes(32), b"x"),
        lambda: hs.build_identify(bytes(32), bytes(64)),
        lambda: hs.encode_signalling(500, 8),
        lambda: hs.encode_signalling(-1, 1),
    ):
        with pytest.raises(ValueError, match="not"):
            build()


@given(st.floats(0, 1e9) | st.integers(0, 2**64 - 1))
def test_round_trip_times_in_any_number_format(rtt: float) -> None:
    assert hs.parse_rtt(msgpack.packb(rtt)) == float(rtt)
    if isinstance(rtt, float):
        assert hs.build_rtt(rtt) == msgpack.packb(rtt)
        single = struct.unpack(">f", struct.pack(">f", rtt))[0]
        assert hs.parse_rtt(msgpack.packb(rtt, use_single_float=True)) == single


@pytest.mark.parametrize("rtt", [math.nan, math.inf, -math.inf, -1.0, -1, -100, -40000, -(2**40), -0.001])
def test_numbers_that_are_no_duration_are_absent(rtt: float) -> None:
    assert hs.parse_rtt(msgpack.packb(rtt)) is None


@pytest.mark.parametrize("value", ["x", b"x", [], {}, None, True, [1.0]])
def test_what_is_no_number_is_dropped(value: object) -> None:
    assert hs.parse_rtt(msgpack.packb(value)) is Drop.RTT_UNREADABLE


@given(st.binary(max_size=12))
def test_reading_round_trip_times_never_raises(plain: bytes) -> None:
    rtt = hs.parse_rtt(plain)
    assert rtt is None or rtt is Drop.RTT_UNREADABLE or (isinstance(rtt, float) and rtt >= 0)


@pytest.mark.parametrize("size", range(1, 9))
def test_cut_numbers_are_dropped(size: int) -> None:
    assert hs.parse_rtt(hs.build_rtt(1.5)[:size]) is Drop.RTT_UNREADABLE


@given(st.binary(max_size=140))
def test_identify_goes_by_length(plain: bytes) -> None:
    found = hs.parse_identify(plain)
    assert isinstance(found, hs.Identify) is (len(plain) == 128)
    if isinstance(found, hs.Identify):
        assert hs.build_identify(found.public_key, found.signature) == plain
    else:
        assert found is Drop.IDENTIFY_SIZE


@pytest.mark.parametrize(
    "case", [c for c in NEGATIVE if c["name"].startswith(("link_identify", "link_rtt", "link_data"))], ids=by_name
)
def test_negative_frames_open_as_described(case: Case) -> None:
    packet = parsed(unhex(case["raw"]))
    plain = TokenKey(unhex(case["derived_key"])).open(packet.data)
    name = case["name"]
    if name in ("link_data_bad_hmac", "link_rtt_bad_hmac", "link_data_padding_17", "link_data_zero_padding"):
        assert plain is None
        return
    assert plain is not None
    if name == "link_data_empty_plaintext":
        assert plain == b""
    if packet.context == p.CTX_LRRTT:
        rtt = hs.parse_rtt(plain)
        expected = {"link_rtt_not_a_number": Drop.RTT_UNREADABLE, "link_rtt_negative": None}
        assert rtt is expected[name] if name in expected else isinstance(rtt, float)
    if packet.context == p.CTX_LINKIDENTIFY:
        found = hs.parse_identify(plain)
        if name == "link_identify_short":
            assert found is Drop.IDENTIFY_SIZE
            return
        assert isinstance(found, hs.Identify)
        signed = hs.identify_signed_data(packet.destination, found.public_key)
        bad = ("link_identify_bad_signature", "link_identify_other_link")
        assert Identity.from_public(found.public_key).verify(found.signature, signed) is (name not in bad)
