from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rnsfast.crypto import provider as provider_module
from rnsfast.crypto.ed25519 import SigningKey, VerifyKey
from rnsfast.crypto.entropy import system_entropy
from rnsfast.crypto.provider import ENVIRONMENT, OpenSSL, provider
from rnsfast.crypto.x25519 import X25519Key
from tests.vectors_support import Case, by_name, unhex, vectors

ORDER = 2**252 + 27742317777372353535851937790883648493
LOW_ORDER = [
    bytes(32),
    b"\x01" + bytes(31),
    bytes.fromhex("ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f"),
    bytes.fromhex("e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800"),
]


@pytest.mark.parametrize("case", vectors("wire", "signatures"), ids=by_name)
def test_signatures_verify_as_for_the_reference(library: str, case: Case) -> None:
    key = VerifyKey(unhex(case["public_key"])[32:])
    signature, message = unhex(case["signature"]), unhex(case["message"])
    assert key.verify(signature, message) is case["valid"]
    assert key.verify_many([(signature, message)] * 3) == [case["valid"]] * 3


def test_signatures_are_those_of_rfc_8032(library: str) -> None:
    key = SigningKey(bytes.fromhex("c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7"))
    assert key.public.hex() == "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025"
    assert key.sign(b"\xaf\x82").hex() == (
        "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac"
        "18ff9b538d16f290ae67f760984dc6594a7c15e9716ed28dc027beceea1ec40a"
    )
    assert key.sign_many([b"\xaf\x82", b""]) == [key.sign(b"\xaf\x82"), key.sign(b"")]
    assert key.sign_many([]) == []


def test_x25519_is_that_of_rfc_7748(library: str) -> None:
    alice = X25519Key(b"a" * 32)
    bob = X25519Key(bytes.fromhex("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb"))
    assert bob.public.hex() == "de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f"
    shared = alice.exchange(bob.public)
    assert shared is not None and shared == bob.exchange(alice.public)


def test_the_top_bit_of_a_public_key_is_ignored(library: str) -> None:
    a, b = X25519Key(b"a" * 32), X25519Key(b"b" * 32)
    assert a.exchange(b.public[:31] + bytes((b.public[31] | 0x80,))) == a.exchange(b.public)


@pytest.mark.parametrize("public", LOW_ORDER)
def test_low_order_keys_agree_on_nothing(library: str, public: bytes) -> None:
    assert X25519Key(b"k" * 32).exchange(public) is None


@pytest.mark.parametrize("size", [0, 1, 31, 33, 64])
def test_keys_of_a_wrong_length(library: str, size: int) -> None:
    assert X25519Key(b"k" * 32).exchange(bytes(size)) is None
    for make in (X25519Key, SigningKey, VerifyKey):
        with pytest.raises(ValueError, match=f"32 bytes, not {size}"):
            make(bytes(size))


def test_signature_with_s_out_of_range_is_refused(library: str) -> None:
    key = SigningKey(b"s" * 32)
    signature = key.sign(b"m")
    forged = signature[:32] + (int.from_bytes(signature[32:], "little") + ORDER).to_bytes(32, "little")
    assert VerifyKey(key.public).verify(signature, b"m")
    assert not VerifyKey(key.public).verify(forged, b"m")


def test_a_verify_key_that_is_no_curve_point_verifies_nothing(library: str) -> None:
    signature = SigningKey(b"s" * 32).sign(b"m")
    for public in (b"\xff" * 32, bytes(32), b"\x02" + bytes(31)):
        assert not VerifyKey(public).verify(signature, b"m")
        assert not VerifyKey(public).verify(bytes(64), b"m")


@given(st.binary(max_size=130), st.binary(max_size=100), st.binary(min_size=32, max_size=32))
def test_verifying_noise_is_false_and_never_raises(signature: bytes, message: bytes, public: bytes) -> None:
    for make in provider_module.PROVIDERS.values():
        assert make().verifier(public)(signature, message) is False


@given(st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32), st.binary(max_size=300))
def test_the_libraries_agree(seed: bytes, other: bytes, message: bytes) -> None:
    results = set()
    for make in provider_module.PROVIDERS.values():
        library = make()
        public, peer = library.ed25519_public(seed), library.x25519_public(other)
        signature = library.signer(seed)(message)
        assert library.verifier(public)(signature, message)
        assert not library.verifier(public)(signature, message + b"x")
        results.add((public, peer, signature, library.exchanger(seed)(peer)))
    assert len(results) == 1


def test_private_keys_are_kept_as_given(library: str) -> None:
    assert X25519Key(b"\xff" * 32).private == b"\xff" * 32
    assert X25519Key.generate(lambda size: b"r" * size).private == b"r" * 32


def test_threads_share_a_signing_key(library: str) -> None:
    key = SigningKey(b"s" * 32)
    messages = [b"%d" % i for i in range(200)]
    right = [key.sign(m) for m in messages]
    wrong: list[int] = []

    def work() -> None:
        wrong.extend(i for i, m in enumerate(messages) if key.sign(m) != right[i])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_an_unknown_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, "rot13")
    provider.cache_clear()
    with pytest.raises(ValueError, match="RNSFAST_CRYPTO is 'rot13', not one of sodium, pynacl, openssl"):
        provider()


def test_openssl_takes_the_place_of_a_library_without_symbols(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable() -> OpenSSL:
        raise AttributeError("undefined symbol: sodium_init")

    monkeypatch.delenv(ENVIRONMENT, raising=False)
    monkeypatch.setattr(provider_module, "Sodium", unreachable)
    provider.cache_clear()
    assert provider().name == "openssl"
    provider.cache_clear()


@pytest.mark.parametrize("size", [0, 1, 16, 32, 1000])
def test_random_bytes_have_the_size_asked_for_and_differ(library: str, size: int) -> None:
    assert len(system_entropy(size)) == size
    assert size < 16 or system_entropy(size) != system_entropy(size)
