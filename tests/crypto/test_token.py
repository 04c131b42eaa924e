from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CBC
from hypothesis import given
from hypothesis import strategies as st

from rnsfast.crypto.token import OVERHEAD, TokenKey, seal_with_iv
from tests.vectors_support import Case, by_name, maybe, unhex, vectors

ENCRYPT = vectors("wire", "token", "encrypt")
DECRYPT = vectors("wire", "token", "decrypt")
KEY = bytes(range(64))


@pytest.mark.parametrize("case", ENCRYPT)
def test_sealing_makes_the_bytes_of_the_reference(case: Case) -> None:
    key, iv, plain, token = (unhex(case[name]) for name in ("key", "iv", "plaintext", "token"))
    assert seal_with_iv(key, iv, plain) == token
    assert TokenKey(key).open(token) == plain
    # A random block that encrypts to the IV, behind the zero block a fresh cipher begins with.
    block = Cipher(AES(key[len(key) // 2 :]), CBC(bytes(16))).decryptor().update(iv)
    assert TokenKey(key, lambda size: block).seal(plain) == token


@pytest.mark.parametrize("case", DECRYPT, ids=by_name)
def test_opening_agrees_with_the_reference(case: Case) -> None:
    opened = TokenKey(unhex(case["key"])).open(unhex(case["token"]))
    assert opened == maybe(case["plaintext"]) or (opened is None and case["name"] == "sealed, pad byte 0")


def test_a_batch_of_all_cases_under_one_key_opens_as_they_do_alone() -> None:
    key = DECRYPT[0]["key"]
    cases = [case for case in DECRYPT if case["key"] == key]
    assert len(cases) > 10
    tokens = [unhex(case["token"]) for case in cases]
    assert TokenKey(unhex(key)).open_many(tokens) == [TokenKey(unhex(key)).open(token) for token in tokens]


@pytest.mark.parametrize("case", vectors("wire", "token", "key_lengths"), ids=lambda c: str(c["length"]))
def test_key_lengths(case: Case) -> None:
    if case["accepted"]:
        assert TokenKey(bytes(case["length"])).open(TokenKey(bytes(case["length"])).seal(b"x")) == b"x"
    else:
        with pytest.raises(ValueError, match=f"not {case['length']}"):
            TokenKey(bytes(case["length"]))
        with pytest.raises(ValueError, match=f"not {case['length']}"):
            seal_with_iv(bytes(case["length"]), bytes(16), b"")


def test_every_flipped_byte_and_every_length_fails() -> None:
    key = TokenKey(KEY)
    token = key.seal(b"attack at dawn, or a little later")
    flipped = [token[:i] + bytes((token[i] ^ 1,)) + token[i + 1 :] for i in range(len(token))]
    cut = [token[:i] for i in range(len(token))] + [bytes(i) for i in range(81)] + [token + b"x", token + bytes(16)]
    assert key.open_many(flipped + cut) == [None] * len(flipped + cut)
    assert key.open(token) == b"attack at dawn, or a little later"


@given(st.lists(st.lists(st.binary(max_size=100), max_size=8), max_size=6), st.sampled_from([32, 64]))
def test_batches_open_to_what_was_sealed_whatever_went_before(batches: list[list[bytes]], size: int) -> None:
    sealing, opening = TokenKey(KEY[:size]), TokenKey(KEY[:size])
    for plains in batches:
        tokens = sealing.seal_many(plains)
        assert [len(t) for t in tokens] == [OVERHEAD + 16 * (len(p) // 16 + 1) for p in plains]
        # each is exactly what the plain construction makes with its IV
        assert tokens == [
            seal_with_iv(KEY[:size], token[:16], plain) for token, plain in zip(tokens, plains, strict=True)
        ]
        assert opening.open_many(tokens) == plains


@given(st.lists(st.one_of(st.none(), st.binary(max_size=90)), max_size=8), st.binary(max_size=40))
def test_damaged_tokens_do_not_disturb_their_neighbours(plains: list[bytes | None], noise: bytes) -> None:
    key = TokenKey(KEY)
    tokens = [noise if plain is None else key.seal(plain) for plain in plains]
    assert key.open_many(tokens) == plains


@given(st.lists(st.binary(max_size=200)))
def test_noise_never_raises(tokens: list[bytes]) -> None:
    assert TokenKey(KEY).open_many(tokens) == [None] * len(tokens)


def test_ivs_differ_within_and_between_batches() -> None:
    key = TokenKey(KEY)
    ivs = [token[:16] for _ in range(10) for token in key.seal_many([b"same"] * 10)]
    assert len(set(ivs)) == 100


def test_randomness_is_drawn_once_a_batch() -> None:
    drawn: list[int] = []

    def entropy(size: int) -> bytes:
        drawn.append(size)
        return bytes(size)

    TokenKey(KEY, entropy).seal_many([b""] * 5)
    TokenKey(KEY, entropy).seal(b"")
    assert drawn == [80, 16]


def test_empty_batches() -> None:
    assert TokenKey(KEY).seal_many([]) == TokenKey(KEY).open_many([]) == []
