"""The seam to the C libraries that do Ed25519 and X25519.

Three ways in, the same results:

    sodium   libsodium, the copy bundled with PyNaCl, through ctypes.PyDLL: the calls keep the GIL
    pynacl   libsodium through PyNaCl's own bindings: every call releases the GIL
    openssl  OpenSSL through `cryptography`

A call that releases the GIL may wait a whole switch interval (5 ms) to get it back when another thread computes; one
signature takes 13 us.  So calls this short keep it.  The figures are in docs/decisions.md, "Cryptography providers".
RNSFAST_CRYPTO=sodium|pynacl|openssl overrides the choice, for tests and measurements.

All take and return raw bytes. Keys have the right length: the callers see to that.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache
from typing import Final, Protocol

ENVIRONMENT: Final = "RNSFAST_CRYPTO"
_ZERO: Final = bytes(32)

Sign = Callable[[bytes], bytes]
Verify = Callable[[bytes, bytes], bool]  # (signature, message)
Exchange = Callable[[bytes], bytes | None]  # public key of the peer -> shared secret, None if it is all zeroes


class Provider(Protocol):
    """What `ed25519` and `x25519` need of a library. Functions are made once a key, then called once a message."""

    name: str

    def random(self, size: int) -> bytes:
        """Random bytes from the operating system."""

    def ed25519_public(self, seed: bytes) -> bytes:
        """The public key of a 32-byte seed."""

    def signer(self, seed: bytes) -> Sign:
        """A function that signs with this seed."""

    def verifier(self, public: bytes) -> Verify:
        """A function that verifies with this key. Never raises; the signature may have any length."""

    def yielding_signer(self, seed: bytes) -> Sign:
        """As `signer`, but other threads run meanwhile: for one message somebody waits for, never for a batch."""

    def yielding_verifier(self, public: bytes) -> Verify:
        """As `verifier`, but other threads run meanwhile."""

    def x25519_public(self, private: bytes) -> bytes:
        """The public key of 32 private bytes, which need not be clamped."""

    def exchanger(self, private: bytes) -> Exchange:
        """A function that agrees on a secret with a public key of 32 bytes."""


class OpenSSL:
    """OpenSSL through `cryptography`."""

    name = "openssl"
    random = staticmethod(os.urandom)

    def __init__(self) -> None:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric import ed25519, x25519

        self._ed, self._x, self._invalid = ed25519, x25519, InvalidSignature

    def ed25519_public(self, seed: bytes) -> bytes:
        return self._ed.Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()

    def signer(self, seed: bytes) -> Sign:
        return self._ed.Ed25519PrivateKey.from_private_bytes(seed).sign

    def verifier(self, public: bytes) -> Verify:
        check, invalid = self._ed.Ed25519PublicKey.from_public_bytes(public).verify, self._invalid

        def verify(signature: bytes, message: bytes) -> bool:
            try:
                check(signature, message)
            except invalid:
                return False
            return True

        return verify

    yielding_signer, yielding_verifier = signer, verifier  # they always release it

    def x25519_public(self, private: bytes) -> bytes:
        return self._x.X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()

    def exchanger(self, private: bytes) -> Exchange:
        agree, load = self._x.X25519PrivateKey.from_private_bytes(private).exchange, self._x.X25519PublicKey

        def exchange(public: bytes) -> bytes | None:
            try:
                return agree(load.from_public_bytes(public))
            except ValueError:  # the secret would be all zeroes
                return None

        return exchange


class Sodium:
    """libsodium through ctypes, keeping the GIL. OSError or AttributeError if its symbols cannot be reached."""

    name = "sodium"

    def __init__(self) -> None:
        import nacl._sodium  # type: ignore[import-not-found,unused-ignore]

        library = ctypes.PyDLL(nacl._sodium.__file__)
        releasing = ctypes.CDLL(nacl._sodium.__file__)
        text, size, out = ctypes.c_char_p, ctypes.c_ulonglong, ctypes.c_void_p
        library.sodium_init.restype = ctypes.c_int
        if library.sodium_init() < 0:
            raise OSError("libsodium could not be initialised")

        def function(symbol: str, *arguments: type, source: ctypes.CDLL = library) -> Callable[..., int]:
            found = getattr(source, symbol)
            found.argtypes, found.restype = arguments, ctypes.c_int
            return found  # type: ignore[no-any-return]

        self._keypair = function("crypto_sign_ed25519_seed_keypair", out, out, text)
        self._sign = function("crypto_sign_ed25519_detached", out, out, text, size, text)
        self._verify = function("crypto_sign_ed25519_verify_detached", text, text, size, text)
        self._sign_yielding = function("crypto_sign_ed25519_detached", out, out, text, size, text, source=releasing)
        verify = "crypto_sign_ed25519_verify_detached"
        self._verify_yielding = function(verify, text, text, size, text, source=releasing)
        self._base = function("crypto_scalarmult_curve25519_base", out, text)
        self._multiply = function("crypto_scalarmult_curve25519", out, text, text)
        self._random = library.randombytes_buf
        self._random.argtypes, self._random.restype = (out, ctypes.c_size_t), None
        self._key_type = ctypes.c_char * 32
        self._signature_type = ctypes.c_char * 64

    def random(self, size: int) -> bytes:
        buffer = ctypes.create_string_buffer(size)
        self._random(buffer, size)
        return buffer.raw

    def _pair(self, seed: bytes) -> tuple[bytes, bytes]:
        public, secret = self._key_type(), self._signature_type()
        self._keypair(public, secret, seed)
        return public.raw, secret.raw

    def ed25519_public(self, seed: bytes) -> bytes:
        return self._pair(seed)[0]

    def signer(self, seed: bytes) -> Sign:
        return self._signer(self._sign, seed)

    def yielding_signer(self, seed: bytes) -> Sign:
        return self._signer(self._sign_yielding, seed)

    def _signer(self, call: Callable[..., int], seed: bytes) -> Sign:
        new, (_, secret) = self._signature_type, self._pair(seed)

        def sign(message: bytes) -> bytes:
            signature = new()  # one a call, so that threads may share a key
            call(signature, None, message, len(message), secret)
            return signature.raw

        return sign

    def verifier(self, public: bytes) -> Verify:
        return self._verifier(self._verify, public)

    def yielding_verifier(self, public: bytes) -> Verify:
        return self._verifier(self._verify_yielding, public)

    @staticmethod
    def _verifier(call: Callable[..., int], public: bytes) -> Verify:
        def verify(signature: bytes, message: bytes) -> bool:
            return len(signature) == 64 and call(signature, message, len(message), public) == 0

        return verify

    def x25519_public(self, private: bytes) -> bytes:
        public = self._key_type()
        self._base(public, private)
        return public.raw

    def exchanger(self, private: bytes) -> Exchange:
        call, new = self._multiply, self._key_type

        def exchange(public: bytes) -> bytes | None:
            shared = new()
            return shared.raw if call(shared, private, public) == 0 else None

        return exchange


class PyNaCl:
    """libsodium through PyNaCl's bindings, which release the GIL in each call."""

    name = "pynacl"
    random = staticmethod(os.urandom)

    def __init__(self) -> None:
        import nacl.bindings
        import nacl.exceptions

        nacl.bindings.sodium_init()
        self._nacl, self._error = nacl.bindings, nacl.exceptions.CryptoError

    def ed25519_public(self, seed: bytes) -> bytes:
        return self._nacl.crypto_sign_seed_keypair(seed)[0]

    def signer(self, seed: bytes) -> Sign:
        call, secret = self._nacl.crypto_sign, self._nacl.crypto_sign_seed_keypair(seed)[1]
        return lambda message: call(message, secret)[:64]

    def verifier(self, public: bytes) -> Verify:
        call, error = self._nacl.crypto_sign_open, self._error

        def verify(signature: bytes, message: bytes) -> bool:
            if len(signature) != 64:
                return False
            try:
                call(signature + message, public)
            except error:
                return False
            return True

        return verify

    yielding_signer, yielding_verifier = signer, verifier  # they always release it

    def x25519_public(self, private: bytes) -> bytes:
        return self._nacl.crypto_scalarmult_base(private)

    def exchanger(self, private: bytes) -> Exchange:
        call, error = self._nacl.crypto_scalarmult, self._error

        def exchange(public: bytes) -> bytes | None:
            try:
                return call(private, public)
            except error:  # the secret would be all zeroes
                return None

        return exchange


PROVIDERS: Final[dict[str, Callable[[], Provider]]] = {"sodium": Sodium, "pynacl": PyNaCl, "openssl": OpenSSL}


@cache
def provider(name: str | None = None) -> Provider:
    """The provider of that name; None: the one RNSFAST_CRYPTO names, else the fastest that works here.

    Raises ValueError for an unknown name. Where libsodium's symbols cannot be reached, OpenSSL takes its place unless
    another was asked for by name.
    """
    wanted = name or os.environ.get(ENVIRONMENT)
    if wanted:
        if wanted not in PROVIDERS:
            raise ValueError(f"{ENVIRONMENT} is {wanted!r}, not one of {', '.join(PROVIDERS)}")
        return PROVIDERS[wanted]()
    try:
        return Sodium()
    except (ImportError, OSError, AttributeError):  # PyNaCl built without a dynamic symbol table, or not there
        return OpenSSL()
