from __future__ import annotations

from hashlib import sha256

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import given
from hypothesis import strategies as st

from rnsfast.crypto.hashes import full, short, truncated
from rnsfast.crypto.hkdf import hkdf
from tests.vectors_support import Case, by_name, maybe, unhex, vectors

HKDF_CASES = vectors("wire", "hkdf")


@pytest.mark.parametrize("case", vectors("wire", "hashes"))
def test_hashes_keep_the_first_bytes(case: Case) -> None:
    data = unhex(case["data"])
    assert full(data).hex() == case["full"]
    assert truncated(data).hex() == case["truncated"]
    assert short(data).hex() == case["name_hash_or_ratchet_id"]


@pytest.mark.parametrize("case", [c for c in HKDF_CASES if "error" not in c], ids=by_name)
def test_derived_keys_are_those_of_the_reference(case: Case) -> None:
    derived = hkdf(case["length"], unhex(case["ikm"]), maybe(case["salt"]), unhex(case["context"]))
    if "okm" in case:
        assert derived.hex() == case["okm"]
    else:
        assert len(derived) == case["length"]
        assert sha256(derived).hexdigest() == case["okm_sha256"]
        assert derived[-64:].hex() == case["okm_tail"]


@pytest.mark.parametrize("case", [c for c in HKDF_CASES if "error" in c], ids=by_name)
def test_no_length_and_no_key_material_are_refused(case: Case) -> None:
    with pytest.raises((ValueError, TypeError)):
        hkdf(case["length"], maybe(case["ikm"]), maybe(case["salt"]))  # type: ignore[arg-type]


@given(st.integers(1, 8160), st.binary(max_size=80), st.binary(max_size=100), st.binary(max_size=40))
def test_up_to_the_limit_of_the_standard_it_is_the_standard(length: int, ikm: bytes, salt: bytes, info: bytes) -> None:
    assert hkdf(length, ikm, salt, info) == HKDF(hashes.SHA256(), length, salt or None, info).derive(ikm)


def test_negative_length_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 byte, not -1"):
        hkdf(-1, b"x")
