"""Proof-of-work stamps: 32 bytes whose hash, behind a block made from what they stand for, begins with zero bits.

Protocol 02, section 15.2.  The block is 5120 bytes, a whole number of SHA-256 blocks, so a try is one more compression
on a copy of its state: 0.6 us, against 3 us for hashing everything each time.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from typing import Final

from rnsfast.crypto.entropy import Entropy, system_entropy
from rnsfast.crypto.hashes import full
from rnsfast.crypto.hkdf import hkdf

STAMP_SIZE: Final = 32  # bytes
ROUNDS: Final = 20
ROUND_SIZE: Final = 256  # bytes of the block a round
MAX_COST: Final = 40  # bits; a search for more would take days
SLICE: Final = 256  # tries between looks at whether to go on; other threads run at least that often
PATIENCE: Final = 64  # times the expected number of tries, then the search is given up: never seen to happen


def work_block(subject: bytes) -> bytes:
    """The 5120 bytes that stamps for `subject` are searched and checked with. `subject` is a hash of 32 bytes."""
    return b"".join(
        hkdf(ROUND_SIZE, subject, full(subject + bytes((n,)))) for n in range(ROUNDS)
    )  # the byte is n as msgpack


def stamp_value(block: bytes, stamp: bytes) -> int:
    """The number of leading zero bits: how much work the stamp stands for on average, as a power of two."""
    return 256 - int.from_bytes(full(block + stamp), "big").bit_length()


def is_valid(block: bytes, stamp: bytes, cost: int) -> bool:
    """Whether the stamp is worth `cost` bits."""
    return len(stamp) == STAMP_SIZE and int.from_bytes(full(block + stamp), "big") <= 1 << (256 - cost)


def find_stamp(
    block: bytes, cost: int, *, is_cancelled: Callable[[], bool] = lambda: False, entropy: Entropy = system_entropy
) -> bytes | None:
    """Search a stamp worth `cost` bits: 2 ** cost tries on average. None if cancelled. ValueError beyond MAX_COST.

    Takes the time it takes: call it on a thread that nobody waits for, without the node's lock.
    """
    if not 0 <= cost <= MAX_COST:
        raise ValueError(f"a stamp of {cost} bits is not searched for, accepted is 0..{MAX_COST}")
    target, prefix = 1 << (256 - cost), entropy(STAMP_SIZE - 8)
    from_bytes = int.from_bytes
    for start in range(0, PATIENCE << cost, SLICE):
        if is_cancelled():
            return None
        copy = sha256(block).copy  # hashing so much lets other threads run
        for n in range(start, start + SLICE):
            stamp = prefix + n.to_bytes(8, "big")
            state = copy()
            state.update(stamp)
            if from_bytes(state.digest(), "big") <= target:
                return stamp
    return None
