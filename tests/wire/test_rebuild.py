"""Packets of the reference built again, byte for byte, from keys and random draws."""

from __future__ import annotations

from typing import Any

import pytest

from rnsfast.crypto.ed25519 import SigningKey
from rnsfast.crypto.hashes import full, short, truncated
from rnsfast.crypto.identity import Identity
from rnsfast.crypto.token import TokenKey, seal_with_iv
from rnsfast.crypto.x25519 import X25519Key
from rnsfast.wire import packet as p
from rnsfast.wire.announce import (
    Announce,
    build_announce,
    emission_time,
    parse_announce,
    random_blob,
    signed_data,
)
from rnsfast.wire.handshake import (
    LinkRequest,
    build_link_proof,
    build_link_request,
    link_proof_signed_data,
    parse_link_proof,
    parse_link_request,
    parse_rtt,
)
from rnsfast.wire.names import destination_hash, name_hash
from rnsfast.wire.packet import Packet, build_packet, make_raw, parse_packet
from rnsfast.wire.pathrequest import PATH_REQUEST_DESTINATION, PathRequest, build_path_request, parse_path_request
from tests.vectors_support import Case, by_name, maybe, unhex, vectors

PACKETS = vectors("wire", "packets")
#: Contexts whose data is clear on a link (protocol 01, 4.2).
CLEAR = {p.CTX_RESOURCE, p.CTX_RESOURCE_PRF, p.CTX_CACHE_REQUEST, p.CTX_KEEPALIVE, p.CTX_LRPROOF}


def named(prefix: str) -> list[Case]:
    found = [case for case in PACKETS if case["name"].startswith(prefix)]
    assert found
    return found


def parsed(case: Case) -> Packet:
    packet = parse_packet(unhex(case["raw"]))
    assert isinstance(packet, Packet)
    return packet


def draws(case: Case) -> list[bytes]:
    return [unhex(draw) for draw in case["random"]]


def test_path_request() -> None:
    (case,) = named("PLAIN data: path request")
    tag = truncated(draws(case)[0])
    packet = parsed(case)
    request = PathRequest(packet.data[:16], None, tag)
    assert parse_path_request(packet.data) == request
    assert make_raw(0x08, PATH_REQUEST_DESTINATION, 0, build_path_request(request)).hex() == case["raw"]


def test_plain_data() -> None:
    case = next(case for case in PACKETS if case["name"] == "PLAIN data")
    assert make_raw(0x08, parsed(case).destination, 0, unhex(case["plaintext"])).hex() == case["raw"]


@pytest.mark.parametrize("case", named("SINGLE data"), ids=by_name)
def test_data_to_a_single_destination(case: Case) -> None:
    identity = Identity.from_public(unhex(case["to_public_key"]))
    ratchet = maybe(case.get("ratchet_private"))
    rest = [unhex(case["ephemeral_private"]), unhex(case["iv"])]
    public = None if ratchet is None else X25519Key(ratchet).public
    sealed = identity.encrypt(unhex(case["plaintext"]), public, lambda size: rest.pop(0))
    assert make_raw(0, parsed(case).destination, 0, sealed).hex() == case["raw"]
    if public is not None:
        assert short(public).hex() == case["ratchet_id"]


@pytest.mark.parametrize("case", [c for c in named("ANNOUNCE") if "random" in c], ids=by_name)
def test_announces(case: Case) -> None:
    packet = parsed(case)
    private = next(c["private_key"] for c in PACKETS if c.get("full_name"))
    random = draws(case)
    found = parse_announce(packet)
    assert isinstance(found, Announce)
    identity = Identity.from_private(unhex(private))
    if identity.public_key != found.public_key:  # another destination's: at least it is consistent
        identity = Identity.from_public(found.public_key)
    blob = random_blob(full(random[0])[:5], case["time"])
    ratchet = X25519Key(unhex(case["ratchet_private"])).public if "ratchet_private" in case else None
    app_data = maybe(case.get("app_data"))
    announce = Announce(
        destination_hash(found.name_hash, identity.hash),
        identity.public_key,
        found.name_hash,
        blob,
        ratchet,
        b"",
        app_data if app_data is not None or ratchet is None else b"",
    )
    signature = identity.sign(signed_data(announce)) if identity.has_private else found.signature
    assert identity.verify(signature, signed_data(announce))
    flags = p.ANNOUNCE | (p.CONTEXT_FLAG if ratchet else 0)
    raw = make_raw(flags, announce.destination, packet.context, build_announce(announce, signature))
    assert raw.hex() == case["raw"]
    assert emission_time(found.random_blob) == int(case["time"])
    assert build_announce(found) == packet.data


def test_name_in_an_announce() -> None:
    case = next(case for case in PACKETS if "full_name" in case)
    found = parse_announce(parsed(case))
    assert isinstance(found, Announce)
    assert found.name_hash == name_hash(*case["full_name"].split("."))


def test_a_relayed_announce_reads_like_the_one_it_was() -> None:
    (case,) = named("ANNOUNCE relayed")
    found = parse_announce(parsed(case))
    assert isinstance(found, Announce)
    assert Identity.from_public(found.public_key).verify(found.signature, signed_data(found))
    assert destination_hash(found.name_hash, truncated(found.public_key)) == found.destination


def test_link_request_and_proof() -> None:
    (case,) = named("LINKREQUEST")
    x25519, seed = draws(case)[:2]
    packet = parsed(case)
    found = parse_link_request(packet.data)
    assert isinstance(found, LinkRequest)
    request = LinkRequest(X25519Key(x25519).public, SigningKey(seed).public, found.mtu, found.mode)
    assert make_raw(0x02, packet.destination, 0, build_link_request(request)).hex() == case["raw"]
    assert p.link_id(unhex(case["raw"])).hex() == case["link_id"]

    (case,) = named("LRPROOF")
    packet = parsed(case)
    proof: Any = parse_link_proof(packet.data)
    assert proof.x25519 == X25519Key(draws(case)[0]).public
    public_keys = {c["to_public_key"] for c in PACKETS if "to_public_key" in c}
    owners = [
        key
        for key in map(unhex, public_keys)
        if Identity.from_public(key).verify(
            proof.signature, link_proof_signed_data(packet.destination, proof.x25519, key[32:], proof.signalling)
        )
    ]
    assert len(owners) == 1
    data = build_link_proof(proof.signature, proof.x25519, proof.signalling)
    assert make_raw(0x0F, packet.destination, p.CTX_LRPROOF, data).hex() == case["raw"]


@pytest.mark.parametrize("case", [*named("LINK, "), *named("LRRTT")], ids=by_name)
def test_link_packets(case: Case) -> None:
    packet = parsed(case)
    plain = unhex(case["plaintext"])
    iv = unhex(case["iv"]) if "iv" in case else draws(case)[0] if "random" in case else b""
    assert case["encrypted"] is (packet.context not in CLEAR)
    if case["encrypted"]:
        key = unhex(case["link_key"])
        assert TokenKey(key).open(packet.data) == plain
        data = seal_with_iv(key, iv, plain)
    else:
        data = plain
    assert build_packet(Packet(packet.flags, 0, None, packet.destination, packet.context, data)).hex() == case["raw"]
    if packet.context == p.CTX_LRRTT:
        assert isinstance(parse_rtt(plain), float)


@pytest.mark.parametrize("case", vectors("wire", "group"))
def test_data_to_a_group(case: Case) -> None:
    sealed = seal_with_iv(unhex(case["key"]), unhex(case["iv"]), unhex(case["plaintext"]))
    raw = make_raw(p.GROUP << 2, unhex(case["destination_hash"]), 0, sealed)
    assert raw.hex() == case["packet"]["raw"]
    assert p.packet_hash(raw).hex() == case["packet"]["packet_hash"]
