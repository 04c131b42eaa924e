"""Discovery announces and records: what the reference says, and what no listener should take."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rnsfast.crypto.hashes import full
from rnsfast.crypto.identity import Identity
from rnsfast.crypto.stamp import is_valid, stamp_value, work_block
from rnsfast.node.configfile import parse as parse_config
from rnsfast.wire.announce import parse_announce
from rnsfast.wire.discovery import (
    BACKBONE,
    ENCRYPTED,
    FIELDS,
    Offer,
    build_info,
    clean_name,
    discovery_hash,
    endpoint_hash,
    info_hash,
    is_host_name,
    is_ip_address,
    parse_info,
    split_payload,
)
from rnsfast.wire.discoveryrecord import Record, as_map, build_record, config_entry, parse_record
from rnsfast.wire.drop import Drop
from rnsfast.wire.packet import Packet, parse_packet
from tests.vectors_support import Case, by_name, vectors

SENT = [case for case in vectors("transport", "discovery", "app_data") if "packed_info" in case]
HEARD = [case for case in vectors("node", "discovery", "announces") if case["app_data"]]
MADE_OTHERWISE = {"name", "config_entry", "discovery_hash"}  # of a name with a line break in it

COMPLETE = Offer(
    kind=BACKBONE, transport=True, transport_id=bytes(16), name="n", reachable_on="198.51.100.7", port=4242
)


def changed(**fields: Any) -> bytes:
    """A packed offer with these values, right or wrong; None leaves a field out."""
    found = msgpack.unpackb(build_info(COMPLETE), strict_map_key=False)
    for field, value in fields.items():
        found[FIELDS[field]] = value
    return bytes(msgpack.packb(found))


def info_of(case: Case, offer: Offer, stamp: bytes) -> dict[str, Any]:
    record = Record(
        offer=offer, stamp=stamp, value=case["stamp_value"], network_id=bytes.fromhex(network(case)), hops=0,
        received=0.0, discovered=0.0, last_heard=0.0,
    )  # fmt: skip
    return {key: value.hex() if isinstance(value, bytes) else value for key, value in as_map(record).items()}


def network(case: Case) -> str:
    return str(case.get("announcer_identity_hash") or case["info"]["network_id"])


@pytest.mark.parametrize("case", SENT, ids=by_name)
def test_announces_are_taken_as_the_reference_takes_them(case: Case) -> None:
    payload = bytes.fromhex(case["app_data"])[1:]
    if "network_private_key" in case:
        assert int(case["app_data"][:2], 16) & ENCRYPTED
        opened = Identity.from_private(bytes.fromhex(case["network_private_key"])).decrypt(payload)
        assert opened is not None
        payload = opened[0]
    packed, stamp = split_payload(payload)
    assert (packed.hex(), stamp.hex()) == (case["packed_info"], case["stamp"])
    block = work_block(info_hash(packed))
    if "workblock_sha256" in case:
        assert (info_hash(packed).hex(), full(block).hex()) == (case["infohash"], case["workblock_sha256"])
        assert len(block) == case["workblock_length"]
    assert stamp_value(block, stamp) == case["stamp_value"]
    offer = parse_info(packed)
    taken = is_valid(block, stamp, case["required_value"]) and isinstance(offer, Offer)
    assert taken == (case["accepted"] is not None)
    if case["accepted"] is not None:
        assert isinstance(offer, Offer)
        ours = info_of(case, offer, stamp)
        skip = MADE_OTHERWISE if case["name"] == "dirty_name" else set()
        assert {key: ours[key] for key in case["accepted"] if key not in skip} == {
            key: value for key, value in case["accepted"].items() if key not in skip
        }


def test_a_line_break_in_a_name_does_not_reach_the_configuration() -> None:
    case = next(case for case in SENT if case["name"] == "dirty_name")
    offer = parse_info(bytes.fromhex(case["packed_info"]))
    assert isinstance(offer, Offer) and offer.name == "Zo the node"
    assert config_entry(offer).splitlines()[0] == "[[Zo the node]]"


@pytest.mark.parametrize("case", HEARD, ids=by_name)
def test_what_other_nodes_announce_is_read_and_built_again(case: Case) -> None:
    packed, stamp = split_payload(bytes.fromhex(case["app_data"])[1:])
    offer = parse_info(packed)
    assert isinstance(offer, Offer)
    assert parse_info(build_info(offer)) == offer
    for key, value in case["info_fields"].items():
        field = next(field for field, number in FIELDS.items() if number == int(key, 16))
        ours = getattr(offer, field)
        assert (ours.hex() if isinstance(ours, bytes) else ours) == value
    block = work_block(info_hash(packed))
    assert full(block).hex() == case["workblock_sha256"] and stamp_value(block, stamp) == case["stamp_value"]
    assert is_valid(block, stamp, 6) == case["accepted_at_required_6"]
    assert is_valid(block, stamp, 24) == case["accepted_at_required_24"]
    ours, skip = info_of(case, offer, stamp), {"received", "hops"}
    assert {k: ours[k] for k in case["info"] if k not in skip} == {
        k: v for k, v in case["info"].items() if k not in skip
    }


def test_packed_offers_are_the_bytes_of_the_reference() -> None:
    case = next(case for case in HEARD if case["name"] == "tcp_server_ifac_location")
    packed, _ = split_payload(bytes.fromhex(case["app_data"])[1:])
    offer = parse_info(packed)
    assert isinstance(offer, Offer) and build_info(offer) == packed


def test_the_announce_around_it_is_an_ordinary_one() -> None:
    case = vectors("transport", "discovery", "announce")
    packet = parse_packet(bytes.fromhex(case["raw"]))
    assert isinstance(packet, Packet)
    announce = parse_announce(packet)
    assert not isinstance(announce, Drop) and announce.app_data is not None
    assert isinstance(parse_info(split_payload(announce.app_data[1:])[0]), Offer)


def test_records_are_the_files_of_the_reference() -> None:
    stored = vectors("node", "discovery", "stored")
    first, second = bytes.fromhex(stored["after_first"]), bytes.fromhex(stored["after_second"])
    record = parse_record(first)
    assert record is not None and record.heard_count == 0
    assert build_record(record) == first
    assert stored["path"].endswith(record.hash.hex())
    again = parse_record(second)
    assert again is not None and again.heard_count == 1 and build_record(again) == second


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kind", "MagicInterface"), ("kind", 7), ("kind", b"BackboneInterface"), ("transport", 1), ("transport", None),
        ("transport_id", bytes(15)), ("transport_id", "x" * 16), ("name", b"n"), ("latitude", 51), ("height", "high"),
        ("longitude", float("nan")), ("latitude", float("inf")), ("reachable_on", "not a host"), ("reachable_on", None),
        ("reachable_on", b"198.51.100.7"), ("reachable_on", "fe80::1%eth0"), ("port", 0), ("port", 65536),
        ("port", True), ("port", "4242"), ("network_name", "a\nb"), ("passphrase", 5), ("passphrase", "\u2028"),
        ("operator", bytes(15)), ("version", "1\r"), ("implementation", ["RNS"]), ("frequency", -1),
    ],
)  # fmt: skip
def test_a_field_of_the_wrong_kind_is_refused(field: str, value: Any) -> None:
    assert isinstance(parse_info(changed(**{field: value})), Drop)


@pytest.mark.parametrize("field", ["kind", "transport", "transport_id", "name", "latitude", "reachable_on", "port"])
def test_what_is_required_must_be_there(field: str) -> None:
    found = msgpack.unpackb(build_info(COMPLETE), strict_map_key=False)
    del found[FIELDS[field]]
    assert isinstance(parse_info(msgpack.packb(found)), Drop)


@pytest.mark.parametrize("packed", [b"", b"\xc1", b"\x80", b"\x90", b"\x81", b"\xdf\xff\xff\xff\xff", b"\x81\x00"])
def test_malformed_maps_are_refused(packed: bytes) -> None:
    assert isinstance(parse_info(packed), Drop)


def test_a_key_that_is_there_twice_is_refused() -> None:
    packed = build_info(COMPLETE)
    assert isinstance(parse_info(bytes((packed[0] + 1,)) + packed[1:] + b"\x06\x07"), Drop)


@given(st.binary(max_size=400))
def test_whatever_bytes_come_nothing_is_raised(packed: bytes) -> None:
    found = parse_info(packed)
    assert isinstance(found, Offer | Drop)
    parse_record(packed)


@given(st.data())
def test_single_bytes_changed_never_raise(data: st.DataObject) -> None:
    packed = bytearray(build_info(replace(COMPLETE, latitude=1.5, network_name="net", operator=bytes(16))))
    packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    offer = parse_info(bytes(packed))
    if isinstance(offer, Offer):
        assert parse_info(build_info(offer)) == offer


@given(st.text(max_size=60))
def test_clean_names_stay_clean_and_have_no_control_characters(text: str) -> None:
    name = clean_name(text)
    assert clean_name(name) == name
    assert name is None or (name.isascii() and name.isprintable() and name == name.strip() and "  " not in name)


@given(st.text(max_size=40))
def test_suggested_sections_have_as_many_lines_as_they_should(text: str) -> None:
    offer = replace(COMPLETE, name=clean_name(text), passphrase="a#b, c")
    entry = config_entry(offer)
    assert len(entry.splitlines()) == 7
    if not set("'\"[]") & set(offer.name or ""):
        section = parse_config(f"[interfaces]\n{entry}\n".encode(), Path("c"))[0].children[0]
        assert section.children[0].text("passphrase") == "a#b, c"


@pytest.mark.parametrize("case", vectors("node", "discovery", "sanitize_name"), ids=lambda case: repr(case["in"]))
def test_names_are_cleaned_as_by_the_reference(case: Case) -> None:
    assert (clean_name(case["in"]) or "") == (case["out"] or "")


@pytest.mark.parametrize("case", vectors("node", "discovery", "hostname"), ids=lambda case: repr(case["in"]))
def test_hosts_and_addresses_are_told_apart(case: Case) -> None:
    assert (is_host_name(case["in"]), is_ip_address(case["in"])) == (case["hostname"], case["ip"])


def test_hashes_of_records_and_endpoints() -> None:
    for case in vectors("node", "discovery", "endpoint_hash"):
        assert endpoint_hash(case["reachable_on"], case["port"]).hex() == case["hash"]
    assert discovery_hash(replace(COMPLETE, name=None)) == full(b"00" * 16 + b"Discovered BackboneInterface")
