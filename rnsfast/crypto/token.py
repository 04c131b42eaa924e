"""Tokens: what data sealed under a shared key looks like.  Protocol 01, section 6.1.

    IV 16 | AES-CBC of the padded plaintext | HMAC-SHA256 32 over IV and ciphertext

    key of 64 bytes: 32 for the HMAC, then 32 for AES-256; of 32 bytes: 16, then 16 for AES-128

A batch under one key is one call of the cipher each way.  To open, `IV1|C1|IV2|C2|...` is decrypted as one stream: a
block depends on the one before it and on no other, so every message comes out right, and noise stands where its IV
stood.  To seal, `R1|P1|R2|P2|...` is encrypted as one stream, each R a fresh random block: its ciphertext is a
uniformly random IV for the message behind it.  The same argument makes a cipher object good for ever: what it chained
from the batch before goes into a random block or into noise.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from hmac import compare_digest, digest
from typing import Final

from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CBC

from rnsfast.crypto.entropy import Entropy

OVERHEAD: Final = 48  # bytes: IV and HMAC; the padding, 1 to 16 bytes, comes on top
MIN_SIZE: Final = 64  # bytes of the smallest token: IV, one block, HMAC
BLOCK: Final = 16

_PADS: Final = tuple(bytes((16 - i,)) * (16 - i) for i in range(16))  # by length of the plaintext mod 16
_NO_IV: Final = bytes(16)


class TokenKey:
    """A key that seals and opens tokens. ValueError if it has neither 64 nor 32 bytes.

    Not safe for threads: the ciphers in it carry state from one call to the next. The caller holds a lock (in a node,
    the node's lock). Random bytes come from `entropy`, one call a batch.
    """

    __slots__ = ("_aes", "_decrypt", "_encrypt", "_entropy", "_mac")

    def __init__(self, key: bytes, entropy: Entropy = os.urandom) -> None:
        if len(key) not in (32, 64):
            raise ValueError(f"a token key has 64 or 32 bytes, not {len(key)}")
        half = len(key) // 2
        self._mac, self._aes = bytes(key[:half]), bytes(key[half:])
        self._entropy = entropy
        self._encrypt: Callable[[bytes], bytes] | None = None  # made when first needed: many keys only ever open
        self._decrypt: Callable[[bytes], bytes] | None = None

    def seal(self, plaintext: bytes) -> bytes:
        """One token."""
        return self.seal_many((plaintext,))[0]

    def seal_many(self, plaintexts: Sequence[bytes]) -> list[bytes]:
        """A token for each plaintext, in order. The plaintexts may be empty."""
        encrypt = self._encrypt
        if encrypt is None:
            encrypt = self._encrypt = Cipher(AES(self._aes), CBC(_NO_IV)).encryptor().update
        pads, mac, hmac = _PADS, self._mac, digest
        if len(plaintexts) == 1:
            plain = plaintexts[0]
            sealed = encrypt(b"%b%b%b" % (self._entropy(16), plain, pads[len(plain) & 15]))
            return [sealed + hmac(mac, sealed, "sha256")]
        random = self._entropy(BLOCK * len(plaintexts))
        parts: list[bytes] = []
        at = 0
        for plain in plaintexts:
            parts += (random[at : at + 16], plain, pads[len(plain) & 15])
            at += 16
        stream = encrypt(b"".join(parts))
        tokens = []
        at = 0
        for plain in plaintexts:
            end = at + 32 + (len(plain) & -16)
            sealed = stream[at:end]
            tokens.append(sealed + hmac(mac, sealed, "sha256"))
            at = end
        return tokens

    def open(self, token: bytes) -> bytes | None:
        """The plaintext, None if the token is not of this key or damaged."""
        return self.open_many((token,))[0]

    def open_many(self, tokens: Sequence[bytes]) -> list[bytes | None]:
        """The plaintexts of `tokens`, in order; None for each that is damaged, whatever is wrong with it.

        Nothing is decrypted before its HMAC was found right.
        """
        mac, hmac, same = self._mac, digest, compare_digest
        opened: list[bytes | None] = [None] * len(tokens)
        good: list[int] = []
        parts: list[bytes] = []
        for i, token in enumerate(tokens):
            if len(token) >= 64 and not len(token) & 15:
                sealed = token[:-32]
                if same(hmac(mac, sealed, "sha256"), token[-32:]):
                    good.append(i)
                    parts.append(sealed)
        if not good:
            return opened
        decrypt = self._decrypt
        if decrypt is None:
            decrypt = self._decrypt = Cipher(AES(self._aes), CBC(_NO_IV)).decryptor().update
        plain = decrypt(b"".join(parts))
        at = 0
        for i, sealed in zip(good, parts, strict=True):
            end = at + len(sealed)
            pad = plain[end - 1]
            if 1 <= pad <= 16:
                opened[i] = plain[at + 16 : end - pad]
            at = end
        return opened


def seal_with_iv(key: bytes, iv: bytes, plaintext: bytes) -> bytes:
    """One token with a given IV, for keys that are used once. The IV must be random and never repeat under a key."""
    if len(key) not in (32, 64) or len(iv) != BLOCK:
        raise ValueError(f"a key has 64 or 32 bytes and an IV 16, not {len(key)} and {len(iv)}")
    half = len(key) // 2
    encrypt = Cipher(AES(key[half:]), CBC(iv)).encryptor().update
    sealed = iv + encrypt(plaintext + _PADS[len(plaintext) & 15])
    return sealed + digest(key[:half], sealed, "sha256")
