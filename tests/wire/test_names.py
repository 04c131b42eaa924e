from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rnsfast.crypto.identity import Identity
from rnsfast.wire.names import destination_hash, full_name, name_hash, split_name
from tests.vectors_support import Case, maybe, unhex, vectors

CASES = vectors("wire", "destinations", "cases")


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['type']} {c['app_name']}")
def test_names_and_addresses_are_those_of_the_reference(case: Case) -> None:
    identity_hash, aspects = maybe(case["identity_hash"]), list(case["aspects"])
    shown = full_name(case["app_name"], *aspects)
    if case.get("direction") == "IN":  # the identity made for it becomes a hashed aspect
        rest = [unhex(draw) for draw in case["random"]]
        identity = Identity(entropy=lambda size: rest.pop(0))
        assert identity.private_key.hex() == case["generated_private_key"]
        identity_hash = identity.hash
        aspects.append(identity_hash.hex())
        shown = full_name(case["app_name"], *aspects)
    if identity_hash is not None:
        shown += "." + identity_hash.hex()
    assert shown == case["name"]
    name = name_hash(case["app_name"], *aspects)
    assert name.hex() == case["name_hash"]
    assert destination_hash(name, identity_hash).hex() == case["hash"]


@pytest.mark.parametrize("case", vectors("wire", "destinations", "hash_from_name_and_identity"))
def test_addresses_from_dotted_names(case: Case) -> None:
    app, aspects = split_name(case["full_name"])
    assert destination_hash(name_hash(app, *aspects), unhex(case["identity_hash"])).hex() == case["hash"]


@pytest.mark.parametrize("parts", [("a.b",), ("a", "b.c"), (".",)])
def test_dots_in_a_part_are_refused(parts: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="dot"):
        name_hash(*parts)


def test_hashes_of_other_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="16 bytes, not 32"):
        destination_hash(bytes(10), bytes(32))
    with pytest.raises(ValueError, match="10 bytes, not 16"):
        destination_hash(bytes(16), None)


def test_known_name_hashes() -> None:
    assert name_hash("lxmf", "delivery").hex() == "6ec60bc318e2c0f0d908"
    assert name_hash("nomadnetwork", "node").hex() == "213e6311bcec54ab4fde"


@given(st.lists(st.text(st.characters(exclude_characters=".", exclude_categories=["Cs"])), min_size=1))
def test_names_split_into_the_parts_they_were_made_of(parts: list[str]) -> None:
    app, aspects = split_name(full_name(*parts))
    assert [app, *aspects] == parts
