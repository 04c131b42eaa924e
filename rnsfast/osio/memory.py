"""Keeps the C library from giving memory back between two batches.

glibc returns the free top of the heap to the system above a threshold of 128 KiB, so a batch of a few hundred KiB is
paid for in page faults every time: 16 packets of 16 KiB take 3.6 instead of 1.3 ms here.  The threshold follows the
largest block that was mapped by itself and freed, to twice its size (mallopt(3), M_MMAP_THRESHOLD); so one such block
is allocated and freed.  It is never touched, so it costs no memory; what it allows the heap to keep is at most twice
its size.  Then the heap is grown and touched once by what a few full windows need.  Other allocators ignore it.
"""

from __future__ import annotations

from typing import Final

BLOCK: Final = 8 * 1024 * 1024  # bytes; below glibc's limit for the adjustment, 32 MiB
WARM: Final = 4 * 1024 * 1024  # bytes of heap touched at start, so that the first batches find them
PIECE: Final = 65536  # bytes; small enough to come from the heap


def keep_heap() -> None:
    """Once at start, on the thread that moves packets: each thread has a heap of its own. Harmless when repeated."""
    block = bytearray(BLOCK)  # zero pages, not touched
    del block
    pieces = [b"\x01" * PIECE for _ in range(WARM // PIECE)]
    del pieces
