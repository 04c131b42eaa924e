"""File formats shared with the reference."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rnsfast.crypto.identity import Identity
from rnsfast.crypto.x25519 import X25519Key
from rnsfast.wire.knowndest import (
    NEVER_USED,
    KnownDestination,
    build_known_destinations,
    parse_known_destinations,
)
from rnsfast.wire.ratchets import (
    RATCHET_COUNT,
    RATCHET_EXPIRY,
    RATCHET_INTERVAL,
    build_peer_ratchet,
    build_ring,
    is_expired,
    parse_peer_ratchet,
    parse_ring,
    ratchet_id,
)
from tests.vectors_support import Case, by_name, maybe, unhex, vectors

STORAGE = vectors("wire", "storage")
RATCHETS = vectors("wire", "ratchets")
OWNER = Identity.from_private(unhex(RATCHETS["owner_private_key"]))

scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats()
leaves = scalars | st.text(max_size=5) | st.binary(max_size=70)
keys = (
    st.text(max_size=12) | st.binary(min_size=15, max_size=17) | st.sampled_from(["signature", "ratchets", "ratchet"])
)
objects = st.recursive(leaves, lambda o: st.lists(o, max_size=6) | st.dictionaries(keys, o, max_size=3), max_leaves=12)
damaged = st.binary(max_size=80) | objects.map(msgpack.packb)


def test_numbers_are_those_of_the_reference() -> None:
    c = vectors("wire", "constants")
    assert (
        c["ratchet_expiry_s"],
        c["ratchet_count"],
        c["ratchet_interval_s"],
    ) == (RATCHET_EXPIRY, RATCHET_COUNT, RATCHET_INTERVAL)


def entry(case: Case) -> KnownDestination:
    return KnownDestination(
        unhex(case["destination_hash"]),
        case["received"],
        unhex(case["packet_hash"]),
        unhex(case["public_key"]),
        maybe(case["app_data"]),
        case["last_used"],
    )


def test_known_destinations_file_is_that_of_the_reference() -> None:
    entries = [entry(case) for case in STORAGE["entries"]]
    assert build_known_destinations(entries).hex() == STORAGE["file"]
    assert parse_known_destinations(unhex(STORAGE["file"])) == entries


def test_a_file_of_an_older_release_loads() -> None:
    found = parse_known_destinations(unhex(STORAGE["legacy_file"]))
    assert found is not None
    assert [
        {
            "destination_hash": e.destination.hex(),
            "public_key": e.public_key.hex(),
            "app_data": None if e.app_data is None else e.app_data.hex(),
            "last_used": e.used,
        }
        for e in found
    ] == STORAGE["legacy_loads_as"]
    assert found[0].used == NEVER_USED


@pytest.mark.parametrize("case", STORAGE["remember_public_key_length"], ids=lambda c: str(c["length"]))
def test_public_keys_of_other_lengths_are_not_recorded(case: Case) -> None:
    record = KnownDestination(bytes(16), 1.0, bytes(32), bytes(case["length"]), None, 0)
    if case["rejected"]:
        with pytest.raises(ValueError, match=f"public key of {case['length']} bytes"):
            build_known_destinations([record])
    else:
        assert parse_known_destinations(build_known_destinations([record])) == [record]


def test_bad_entries_are_left_out_and_good_ones_stay() -> None:
    good = [1.0, bytes(32), bytes(64), None, 0]
    table = {
        b"short": good,
        bytes(16): good,
        b"a" * 16: [*good[:2], bytes(63), None, 0],
        b"b" * 16: ["late", *good[1:]],
        b"c" * 16: good[:3],
        b"d" * 16: 7,
        b"e" * 16: [*good[:3], 5, 0],
    }
    found = parse_known_destinations(msgpack.packb(table))
    assert found == [KnownDestination(bytes(16), 1.0, bytes(32), bytes(64), None, 0)]


@given(damaged)
def test_damaged_files_never_raise(file: bytes) -> None:
    found = parse_known_destinations(file)
    assert found is None or isinstance(found, list)
    assert parse_ring(file, OWNER.verifying) is None
    peer = parse_peer_ratchet(file)
    assert peer is None or len(peer[0]) == 32


def test_cut_files_are_damaged() -> None:
    file = unhex(STORAGE["file"])
    assert all(parse_known_destinations(file[:i]) is None for i in range(len(file)))


@pytest.mark.parametrize("case", RATCHETS["ids"])
def test_ratchet_ids(case: Case) -> None:
    public = X25519Key(unhex(case["private"])).public
    assert public.hex() == case["public"] and ratchet_id(public).hex() == case["id"]


@pytest.mark.parametrize("case", RATCHETS["ring_files"], ids=by_name)
def test_ring_files_load_as_for_the_reference(case: Case) -> None:
    ring = parse_ring(unhex(case["file"]), OWNER.verifying)
    if case["loads"]:
        assert ring == [unhex(key) for key in case["ring"]]
        assert build_ring(ring, OWNER.signing).hex() == case["file"]
    else:
        assert ring is None


def test_an_empty_ring_is_that_of_the_reference() -> None:
    assert build_ring([], OWNER.signing).hex() == RATCHETS["empty_ring_file"]
    assert parse_ring(unhex(RATCHETS["empty_ring_file"]), OWNER.verifying) == []


def test_rings_with_keys_of_other_lengths_are_damaged() -> None:
    assert parse_ring(build_ring([bytes(31)], OWNER.signing), OWNER.verifying) is None


@pytest.mark.parametrize("case", RATCHETS["peer_files"], ids=by_name)
def test_peer_files_are_used_as_by_the_reference(case: Case) -> None:
    found = parse_peer_ratchet(unhex(case["file"]))
    if found is None:
        assert case["used"] is None
        return
    ratchet, received = found
    assert (None if is_expired(received, received + case["age_s"]) else ratchet) == maybe(case["used"])
    assert build_peer_ratchet(ratchet, received).hex() == case["file"]
