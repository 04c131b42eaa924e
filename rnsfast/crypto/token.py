"""Tokens: what data sealed under a shared key looks like.  Protocol 01, section 6.1.

    IV 16 | AES-CBC of the padded plaintext | HMAC-SHA256 32 over IV and ciphertext

    key of 64 bytes: 32 for the HMAC, then 32 for AES-256; of 32 bytes: 16, then 16 for AES-128

A batch under one key is one call of the cipher each way.  To open, `IV1|C1|IV2|C2|...` is decrypted as one stream: a
block depends on the one before it and on no other, so every message comes out right, and noise stands where its IV
stood.  To seal, `R1|P1|R2|P2|...` is encrypted as one stream, each R a fresh random block: its ciphertext is a
uniformly random IV for the message behind it.  The same argument makes a cipher object good for ever: what it chained
from the batch before goes into a random block or into noise.

All of it keeps the GIL, see `hashes`: the ciphers of `cryptography` too release it for 2048 bytes and more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hmac import compare_digest
from typing import Final

from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CBC

from rnsfast.crypto.entropy import Entropy, system_entropy
from rnsfast.crypto.hashes import PIECE, hmac_sha256, hmac_states, update_long

OVERHEAD: Final = 48  # bytes: IV and HMAC; the padding, 1 to 16 bytes, comes on top
BLOCK: Final = 16
#: Bytes in one join of a batch. Larger ones cost more than they save: the allocator takes buffers above 128 KiB from
#: the system each time, and 16 messages of 16 KiB took 35 us each instead of 15.
GROUP: Final = 32768

Update = Callable[[bytes], bytes]

_PADS: Final = tuple(bytes((16 - i,)) * (16 - i) for i in range(16))  # by length of the plaintext mod 16
_NO_IV: Final = bytes(16)


class TokenKey:
    """A key that seals and opens tokens. ValueError if it has neither 64 nor 32 bytes.

    Not safe for threads: the ciphers in it carry state from one call to the next. The caller holds a lock (in a node,
    the node's lock). Random bytes come from `entropy`, one call a batch.
    """

    __slots__ = ("_aes", "_decrypt", "_encrypt", "_entropy", "_inner", "_outer")

    def __init__(self, key: bytes, entropy: Entropy = system_entropy) -> None:
        if len(key) not in (32, 64):
            raise ValueError(f"a token key has 64 or 32 bytes, not {len(key)}")
        half = len(key) // 2
        self._aes = bytes(key[half:])
        self._inner, self._outer = hmac_states(key[:half])
        self._entropy = entropy
        self._encrypt: Update | None = None  # made when first needed: many keys only ever open
        self._decrypt: Update | None = None

    def seal(self, plaintext: bytes) -> bytes:
        """One token."""
        return self.seal_many((plaintext,))[0]

    def seal_many(self, plaintexts: Sequence[bytes]) -> list[bytes]:
        """A token for each plaintext, in order. The plaintexts may be empty."""
        encrypt = self._encrypt
        if encrypt is None:
            encrypt = self._encrypt = Cipher(AES(self._aes), CBC(_NO_IV)).encryptor().update
        random = self._entropy(BLOCK * len(plaintexts))
        tokens: list[bytes] = []
        if len(plaintexts) == 1 or sum(map(len, plaintexts)) <= GROUP:
            self._seal_group(encrypt, plaintexts, random, tokens)
            return tokens
        first = size = 0
        for i, plain in enumerate(plaintexts):
            size += len(plain)
            if size > GROUP:
                self._seal_group(encrypt, plaintexts[first : i + 1], random[first * 16 : i * 16 + 16], tokens)
                first, size = i + 1, 0
        self._seal_group(encrypt, plaintexts[first:], random[first * 16 :], tokens)
        return tokens

    def _seal_group(self, encrypt: Update, plaintexts: Sequence[bytes], random: bytes, tokens: list[bytes]) -> None:
        pads, fresh_inner, fresh_outer = _PADS, self._inner.copy, self._outer.copy
        parts: list[bytes] = []
        at = 0
        for plain in plaintexts:
            parts += (random[at : at + 16], plain, pads[len(plain) & 15])
            at += 16
        stream = _through(encrypt, b"".join(parts))
        at = 0
        for plain in plaintexts:
            end = at + 32 + (len(plain) & -16)
            sealed = stream[at:end]
            at = end
            inner, outer = fresh_inner(), fresh_outer()
            if len(sealed) <= PIECE:
                inner.update(sealed)
            else:
                update_long(inner, sealed)
            outer.update(inner.digest())
            tokens.append(sealed + outer.digest())

    def open(self, token: bytes) -> bytes | None:
        """The plaintext, None if the token is not of this key or damaged."""
        return self.open_many((token,))[0]

    def open_many(self, tokens: Sequence[bytes]) -> list[bytes | None]:
        """The plaintexts of `tokens`, in order; None for each that is damaged, whatever is wrong with it.

        Nothing is decrypted before its HMAC was found right.
        """
        fresh_inner, fresh_outer, same = self._inner.copy, self._outer.copy, compare_digest
        opened: list[bytes | None] = [None] * len(tokens)
        good: list[int] = []
        parts: list[bytes] = []
        size = 0
        for i, token in enumerate(tokens):
            if len(token) >= 64 and not len(token) & 15:
                sealed = token[:-32]
                inner, outer = fresh_inner(), fresh_outer()
                if len(sealed) <= PIECE:
                    inner.update(sealed)
                else:
                    update_long(inner, sealed)
                outer.update(inner.digest())
                if same(outer.digest(), token[-32:]):
                    good.append(i)
                    parts.append(sealed)
                    size += len(sealed)
                    if size > GROUP:
                        self._open_group(good, parts, opened)
                        good.clear()
                        parts.clear()
                        size = 0
        if good:
            self._open_group(good, parts, opened)
        return opened

    def _open_group(self, good: list[int], parts: list[bytes], opened: list[bytes | None]) -> None:
        decrypt = self._decrypt
        if decrypt is None:
            decrypt = self._decrypt = Cipher(AES(self._aes), CBC(_NO_IV)).decryptor().update
        plain = _through(decrypt, b"".join(parts))
        at = 0
        for i, sealed in zip(good, parts, strict=True):
            end = at + len(sealed)
            pad = plain[end - 1]
            if 1 <= pad <= 16:
                opened[i] = plain[at + 16 : end - pad]
            at = end


def _through(update: Update, data: bytes) -> bytes:
    """`update(data)` in pieces so small that the cipher keeps the GIL."""
    if len(data) <= PIECE:
        return update(data)
    return b"".join([update(data[at : at + PIECE]) for at in range(0, len(data), PIECE)])


def seal_with_iv(key: bytes, iv: bytes, plaintext: bytes) -> bytes:
    """One token with a given IV, for keys that are used once. The IV must be random and never repeat under a key."""
    if len(key) not in (32, 64) or len(iv) != BLOCK:
        raise ValueError(f"a key has 64 or 32 bytes and an IV 16, not {len(key)} and {len(iv)}")
    half = len(key) // 2
    encrypt = Cipher(AES(key[half:]), CBC(iv)).encryptor().update
    sealed = iv + _through(encrypt, plaintext + _PADS[len(plaintext) & 15])
    return sealed + hmac_sha256(hmac_states(key[:half]), sealed)
