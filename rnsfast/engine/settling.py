"""Signatures of a batch: what is to be proved and whose proofs are to be verified, computed without the node's lock.

Signing and verifying is most of the work of a small packet, and needs nothing but keys and bytes.  So a batch is taken
in three steps: `Engine.intake` opens and delivers it and notes the signatures to make and to check, `compute` does
that, `Engine.settle` applies the outcome.  An application that was handed its data in the first step can go on in the
second.  `Engine.receive` does all three in a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rnsfast.crypto.ed25519 import SigningKey, VerifyKey

SMALL: Final = 4  # signatures of a batch that somebody may be waiting for

if TYPE_CHECKING:
    from rnsfast.engine.channel import Envelope
    from rnsfast.engine.link import Link
    from rnsfast.engine.receipts import Receipt


class Settlement:
    """The signatures of one link's part of a batch."""

    __slots__ = ("found", "hashes", "link", "pairs", "peer_key", "signatures", "signing", "valid")

    def __init__(self, link: Link, signing: SigningKey, peer_key: VerifyKey) -> None:
        self.link = link
        self.signing, self.peer_key = signing, peer_key
        self.hashes: list[bytes] = []  # of packets to prove
        self.found: list[Envelope | Receipt] = []  # what waits for the proofs that came
        self.pairs: list[tuple[bytes, bytes]] = []  # (signature, packet hash) of those
        self.signatures: list[bytes] = []
        self.valid: list[bool] = []

    def compute(self) -> None:
        """Sign and verify. Touches no state of the engine; the lock need not be held."""
        self.signatures = self.signing.sign_many(self.hashes)
        self.valid = self.peer_key.verify_many(self.pairs)

    def compute_yielding(self) -> None:
        """As `compute`, letting the threads run that the batch has woken: in every call of a small batch, where they
        are what the peer waits for, and in the first call of a larger one, where a call more would cost a whole switch
        interval beside a thread that computes.
        """
        hashes, pairs = self.hashes, self.pairs
        free = len(hashes) + len(pairs) if len(hashes) + len(pairs) <= SMALL else 1
        sign, verify = self.signing.sign_yielding, self.peer_key.verify_yielding
        checked = min(free, len(pairs))
        valid = [verify(signature, message) for signature, message in pairs[:checked]]
        made = min(free - checked, len(hashes))
        signatures = [sign(message) for message in hashes[:made]]
        self.signatures = signatures + self.signing.sign_many(hashes[made:])
        self.valid = valid + self.peer_key.verify_many(pairs[checked:])
