"""X25519 key agreement, RFC 7748.  Protocol 01, section 1."""

from __future__ import annotations

from rnsfast.crypto.entropy import Entropy, system_entropy
from rnsfast.crypto.provider import provider


class X25519Key:
    """A private key of 32 bytes, kept as given, clamped or not. ValueError for any other length.

    The public half is computed when it is first asked for: trying a ring of ratchets does not need it.
    """

    __slots__ = ("_exchange", "_public", "private")

    def __init__(self, private: bytes) -> None:
        if len(private) != 32:
            raise ValueError(f"an X25519 private key has 32 bytes, not {len(private)}")
        self.private = bytes(private)
        self._exchange = provider().exchanger(self.private)
        self._public: bytes | None = None

    @classmethod
    def generate(cls, entropy: Entropy = system_entropy) -> X25519Key:
        """A new key from 32 random bytes."""
        return cls(entropy(32))

    @property
    def public(self) -> bytes:
        """The public key, 32 bytes."""
        if self._public is None:
            self._public = provider().x25519_public(self.private)
        return self._public

    def exchange(self, peer_public: bytes) -> bytes | None:
        """The shared secret, 32 bytes. None if the peer's key has a wrong length or low order; never raises."""
        return self._exchange(peer_public) if len(peer_public) == 32 else None
