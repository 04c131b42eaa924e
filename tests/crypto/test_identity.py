from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rnsfast.crypto.hkdf import hkdf
from rnsfast.crypto.identity import Identity
from rnsfast.crypto.token import TokenKey
from rnsfast.crypto.x25519 import X25519Key
from rnsfast.errors import IdentityError
from tests.vectors_support import Case, by_name, maybe, unhex, vectors

CASES = vectors("wire", "identities", "cases")


def script(*draws: bytes):
    """Entropy that gives out `draws` in order, each in the size asked for."""
    rest = list(draws)

    def entropy(size: int) -> bytes:
        drawn = rest.pop(0)
        assert len(drawn) == size
        return drawn

    return entropy


@pytest.mark.parametrize("case", CASES, ids=by_name)
def test_identities_are_those_of_the_reference(library: str, case: Case) -> None:
    private, public = unhex(case["private_key"]), unhex(case["public_key"])
    identity = Identity.from_private(private)
    assert identity.private_key == private
    assert identity.public_key == public
    assert identity.hash.hex() == case["hash"]
    assert identity.sign(unhex(case["message"])).hex() == case["signature"]
    half = Identity.from_public(public)
    assert half.hash == identity.hash and half == identity and hash(half) == hash(identity)
    assert half.verify(unhex(case["signature"]), unhex(case["message"]))
    assert not half.has_private and identity.has_private


@pytest.mark.parametrize("case", CASES, ids=by_name)
def test_files_are_those_of_the_reference(tmp_path: Path, case: Case) -> None:
    path = tmp_path / "identity"
    path.write_bytes(unhex(case["file"]))
    identity = Identity.load(path)
    assert identity.public_key.hex() == case["public_key"] == case["public_file"]
    identity.save(tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes().hex() == case["file"]


@pytest.mark.parametrize("case", vectors("wire", "identities", "load"), ids=lambda c: str(c["length"]))
def test_other_lengths_are_no_identity(tmp_path: Path, case: Case) -> None:
    blob, path = unhex(case["blob"]), tmp_path / "identity"
    path.write_bytes(blob)
    assert not (case["private_ok"] or case["public_ok"] or case["file_ok"])
    for make in (Identity.from_private, Identity.from_public):
        with pytest.raises(IdentityError, match=f"64 bytes, this one has {len(blob)}"):
            make(blob)
    with pytest.raises(IdentityError) as error:
        Identity.load(path)
    assert str(path) in str(error.value) and "64" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.skipif(os.name != "posix", reason="file modes")
def test_saved_files_are_private_and_replace_in_one_step(tmp_path: Path) -> None:
    path = tmp_path / "identity"
    path.write_bytes(b"old")
    path.chmod(0o644)
    identity = Identity()
    identity.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert Identity.load(path) == identity
    assert [entry.name for entry in tmp_path.iterdir()] == ["identity"]


def test_a_failed_save_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "identity"
    path.write_bytes(b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rnsfast.crypto.identity.os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        Identity().save(path)
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["identity"]


def test_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Identity.load(tmp_path / "nowhere")


def test_a_new_identity_draws_both_keys_in_order() -> None:
    identity = Identity(entropy=script(b"x" * 32, b"s" * 32))
    assert identity.private_key == b"x" * 32 + b"s" * 32
    assert Identity() != Identity()


def test_the_public_half_does_nothing_private(tmp_path: Path) -> None:
    half = Identity.from_public(Identity().public_key)
    for use in (
        lambda: half.sign(b""),
        lambda: half.private_key,
        lambda: half.signing,
        lambda: half.decrypt(bytes(200)),
        lambda: half.save(tmp_path / "f"),
    ):
        with pytest.raises(IdentityError, match=half.hash.hex()):
            use()
    assert not list(tmp_path.iterdir())


def test_secrets_are_not_shown() -> None:
    identity = Identity()
    assert identity.hash.hex() in repr(identity)
    assert identity.private_key[:8].hex() not in repr(identity)


@pytest.mark.parametrize("case", vectors("wire", "identity_encryption", "encrypt"))
def test_encryption_makes_the_bytes_of_the_reference(library: str, case: Case) -> None:
    identity = Identity.from_public(unhex(case["to_public_key"]))
    made = identity.encrypt(
        unhex(case["plaintext"]),
        maybe(case["ratchet_public"]),
        script(unhex(case["ephemeral_private"]), unhex(case["iv"])),
    )
    assert made.hex() == case["ciphertext"]


@pytest.mark.parametrize("case", vectors("wire", "identity_encryption", "decrypt"), ids=by_name)
def test_decryption_agrees_with_the_reference(library: str, case: Case) -> None:
    identity = Identity.from_private(unhex(case["private_key"]))
    ratchets = [unhex(ratchet) for ratchet in case["ratchets"] or ()]
    result = identity.decrypt(unhex(case["ciphertext"]), ratchets, case["enforce"])
    if case["plaintext"] is None:
        assert result is None
    else:
        assert result == (unhex(case["plaintext"]), maybe(case["ratchet_id"]))


def test_a_damaged_ring_entry_is_passed_over() -> None:
    identity, ratchet = Identity(), X25519Key.generate()
    data = identity.encrypt(b"x", ratchet.public)
    found = identity.decrypt(data, [b"short", ratchet.private])
    assert found is not None and found[0] == b"x"


@pytest.mark.parametrize("ratchet", [bytes(32), b"short", b""])
def test_encrypting_to_an_unusable_ratchet_is_refused(ratchet: bytes) -> None:
    with pytest.raises(IdentityError, match="ratchet"):
        Identity().encrypt(b"x", ratchet)


def test_encrypting_to_an_unusable_key_is_refused() -> None:
    with pytest.raises(IdentityError, match="key"):
        Identity.from_public(bytes(64)).encrypt(b"x")


@given(st.binary(max_size=400), st.booleans())
def test_what_is_encrypted_decrypts(plain: bytes, ratcheted: bool) -> None:
    identity, ratchet = Identity(), X25519Key.generate()
    data = identity.encrypt(plain, ratchet.public if ratcheted else None)
    assert len(data) == 32 + 48 + 16 * (len(plain) // 16 + 1)
    result = identity.decrypt(data, [X25519Key.generate().private, ratchet.private])
    assert result is not None and result[0] == plain and (result[1] is not None) is ratcheted
    assert Identity().decrypt(data) is None


@given(st.binary(max_size=200))
def test_decrypting_noise_is_none(data: bytes) -> None:
    assert Identity().decrypt(data, [b"r" * 32]) is None


def test_the_salt_is_the_identity_even_with_a_ratchet() -> None:
    identity, ratchet = Identity(), X25519Key.generate()
    data = identity.encrypt(b"x", ratchet.public)
    shared = ratchet.exchange(data[:32])
    assert shared is not None
    assert TokenKey(hkdf(64, shared, identity.hash)).open(data[32:]) == b"x"
