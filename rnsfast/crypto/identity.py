"""Identities: a pair of Curve25519 keys, and what is done with them.  Protocol 01, sections 2 and 6.2.

public key, 64 bytes   X25519 public 32 | Ed25519 public 32
private key, 64 bytes  X25519 private 32 | Ed25519 seed 32
hash, 16 bytes         SHA-256(public key)[:16]
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from rnsfast.crypto.ed25519 import SigningKey, VerifyKey
from rnsfast.crypto.entropy import Entropy, system_entropy
from rnsfast.crypto.hashes import short, truncated
from rnsfast.crypto.hkdf import hkdf
from rnsfast.crypto.token import TokenKey, seal_with_iv
from rnsfast.crypto.x25519 import X25519Key
from rnsfast.errors import IdentityError

KEY_SIZE: Final = 64  # bytes, of a public and of a private key


class Identity:
    """An identity, whole or its public half only.

    `Identity()` makes a new one. `Identity.load(path)` and `Identity.from_private(key)` bring back one of your own,
    `Identity.from_public(key)` makes the public half of somebody else's. Identities are equal if their public keys are.

    Attributes:
        public_key: 64 bytes.
        hash: 16 bytes, the identity's address part; printed as bare hex.

    Threads may share an identity.
    """

    __slots__ = ("_exchange_key", "_signing", "hash", "public_key", "verifying")

    public_key: bytes
    hash: bytes
    verifying: VerifyKey

    def __init__(self, *, entropy: Entropy = system_entropy) -> None:
        exchange = X25519Key(entropy(32))
        self._become(exchange, SigningKey(entropy(32)))

    def _become(self, exchange: X25519Key, signing: SigningKey) -> None:
        self._set_public(exchange.public + signing.public)
        self._exchange_key: X25519Key | None = exchange
        self._signing: SigningKey | None = signing

    def _set_public(self, public_key: bytes) -> None:
        self.public_key = bytes(public_key)
        self.hash = truncated(self.public_key)
        self.verifying = VerifyKey(self.public_key[32:])

    @classmethod
    def from_private(cls, private_key: bytes) -> Identity:
        """The identity of a 64-byte private key. Raises IdentityError for any other length."""
        if len(private_key) != KEY_SIZE:
            raise IdentityError(f"an identity's private key has 64 bytes, this one has {len(private_key)}")
        identity = cls.__new__(cls)
        identity._become(X25519Key(private_key[:32]), SigningKey(private_key[32:]))
        return identity

    @classmethod
    def from_public(cls, public_key: bytes) -> Identity:
        """The public half of an identity. Raises IdentityError if `public_key` has not 64 bytes.

        The halves are not checked: one that is no curve point verifies nothing.
        """
        if len(public_key) != KEY_SIZE:
            raise IdentityError(f"an identity's public key has 64 bytes, this one has {len(public_key)}")
        identity = cls.__new__(cls)
        identity._set_public(public_key)
        identity._exchange_key = identity._signing = None
        return identity

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Identity:
        """Read an identity file: the 64 bytes of a private key, nothing else.

        A file with the 64 bytes of a public key cannot be told apart and gives another, useless identity.

        Raises:
            IdentityError: the file has another length.
            OSError: it cannot be read.

        Protocol: 01, section 2.2.
        """
        with open(path, "rb") as file:
            private_key = file.read(KEY_SIZE + 1)
        if len(private_key) != KEY_SIZE:
            size = "more" if len(private_key) > KEY_SIZE else str(len(private_key))
            raise IdentityError(
                f"{os.fspath(path)} is not an identity file: those have exactly 64 bytes, it has {size}"
            )
        return cls.from_private(private_key)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the private key to an identity file that only its owner can read (mode 0600), replacing it in one step.

        Raises:
            IdentityError: this is only the public half.
            OSError: the file cannot be written; one that was there is unchanged.
        """
        private_key, target = self.private_key, Path(path)
        descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)  # made with mode 0600
        try:
            with open(descriptor, "wb") as file:
                file.write(private_key)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise

    @property
    def has_private(self) -> bool:
        """Whether this identity can sign and decrypt."""
        return self._signing is not None

    @property
    def private_key(self) -> bytes:
        """The 64 bytes, as they were given. Raises IdentityError if this is only the public half."""
        return self.exchange_key.private + self.signing.seed

    @property
    def signing(self) -> SigningKey:
        """The Ed25519 private key. Raises IdentityError if this is only the public half."""
        if self._signing is None:
            raise IdentityError(f"identity {self.hash.hex()} is the public half only: it cannot sign")
        return self._signing

    @property
    def exchange_key(self) -> X25519Key:
        """The X25519 private key. Raises IdentityError if this is only the public half."""
        if self._exchange_key is None:
            raise IdentityError(f"identity {self.hash.hex()} is the public half only: it has no private key")
        return self._exchange_key

    def sign(self, message: bytes) -> bytes:
        """The 64-byte signature of `message`. Raises IdentityError if this is only the public half."""
        return self.signing.sign(message)

    def verify(self, signature: bytes, message: bytes) -> bool:
        """Whether this identity signed `message`. Never raises for bad signatures, whatever their length."""
        return self.verifying.verify(signature, message)

    def encrypt(
        self, plaintext: bytes, ratchet_public: bytes | None = None, entropy: Entropy = system_entropy
    ) -> bytes:
        """Encrypt to this identity, with a key pair made for this one message.

        Args:
            plaintext: any bytes, also none.
            ratchet_public: the destination's current ratchet, 32 bytes, which takes the place of the identity's key.
            entropy: draws 32 bytes for the key pair, then 16 for the IV.

        Raises IdentityError if the key encrypted to is unusable (wrong length or low order).

        Protocol: 01, section 6.2.
        """
        ephemeral = X25519Key(entropy(32))
        shared = ephemeral.exchange(self.public_key[:32] if ratchet_public is None else ratchet_public)
        if shared is None:
            whose = "key" if ratchet_public is None else "ratchet"
            raise IdentityError(
                f"the {whose} of identity {self.hash.hex()} is unusable: nothing can be encrypted to it"
            )
        return ephemeral.public + seal_with_iv(hkdf(64, shared, self.hash), entropy(16), plaintext)

    def decrypt(
        self, data: bytes, ratchets: Sequence[bytes] = (), enforce: bool = False
    ) -> tuple[bytes, bytes | None] | None:
        """Decrypt what `encrypt` made.

        Args:
            data: bytes from the network; anything is safe.
            ratchets: private ratchet keys, newest first; all are tried before the identity's own key.
            enforce: do not try the identity's own key.

        Returns:
            (plaintext, id of the ratchet that was used or None); None if it cannot be decrypted.

        Raises IdentityError if this is only the public half.
        """
        own = self.exchange_key
        peer, token = data[:32], data[32:]
        if len(token) < 64:
            return None
        salt = self.hash
        for private in ratchets:
            if len(private) != 32:
                continue
            ratchet = X25519Key(private)
            plaintext = _open(ratchet, peer, salt, token)
            if plaintext is not None:
                return plaintext, short(ratchet.public)
        if enforce:
            return None
        plaintext = _open(own, peer, salt, token)
        return None if plaintext is None else (plaintext, None)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and other.public_key == self.public_key

    def __hash__(self) -> int:
        return hash(self.public_key)

    def __repr__(self) -> str:
        return f"<Identity {self.hash.hex()}{'' if self.has_private else ', public half'}>"


def _open(key: X25519Key, peer: bytes, salt: bytes, token: bytes) -> bytes | None:
    """The plaintext of `token` under the secret that `key` shares with `peer`."""
    shared = key.exchange(peer)
    return None if shared is None else TokenKey(hkdf(64, shared, salt)).open(token)
