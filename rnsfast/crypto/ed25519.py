"""Ed25519 signatures: pure RFC 8032, deterministic, no context.  Protocol 01, section 1."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rnsfast.crypto.provider import provider


class SigningKey:
    """A private key from its 32-byte seed. ValueError for any other length. Threads may share it."""

    __slots__ = ("_sign", "_sign_yielding", "public", "seed")

    def __init__(self, seed: bytes) -> None:
        if len(seed) != 32:
            raise ValueError(f"an Ed25519 seed has 32 bytes, not {len(seed)}")
        library = provider()
        self.seed = bytes(seed)
        self.public = library.ed25519_public(self.seed)
        self._sign = library.signer(self.seed)
        self._sign_yielding = library.yielding_signer(self.seed)

    def sign(self, message: bytes) -> bytes:
        """The 64-byte signature of `message`."""
        return self._sign(message)

    def sign_yielding(self, message: bytes) -> bytes:
        """As `sign`; other threads run meanwhile."""
        return self._sign_yielding(message)

    def sign_many(self, messages: Iterable[bytes]) -> list[bytes]:
        """The signatures of `messages`, in order."""
        return list(map(self._sign, messages))


class VerifyKey:
    """A public key of 32 bytes. ValueError for any other length; 32 bytes that are no curve point verify nothing."""

    __slots__ = ("_verify", "_verify_yielding", "public")

    def __init__(self, public: bytes) -> None:
        if len(public) != 32:
            raise ValueError(f"an Ed25519 public key has 32 bytes, not {len(public)}")
        self.public = bytes(public)
        library = provider()
        self._verify = library.verifier(self.public)
        self._verify_yielding = library.yielding_verifier(self.public)

    def verify(self, signature: bytes, message: bytes) -> bool:
        """Whether `signature` is this key's for `message`. Anything but a valid signature is False, never an error."""
        return self._verify(signature, message)

    def verify_yielding(self, signature: bytes, message: bytes) -> bool:
        """As `verify`; other threads run meanwhile."""
        return self._verify_yielding(signature, message)

    def verify_many(self, pairs: Sequence[tuple[bytes, bytes]]) -> list[bool]:
        """The answers for (signature, message) pairs, in order."""
        verify = self._verify
        return [verify(signature, message) for signature, message in pairs]
