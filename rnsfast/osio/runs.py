"""Runs: neighbouring datagrams that travel through the system as one and are cut by it.  Protocol 09, section 5.3.

Out (segmentation offload): the kernel cuts a byte stream every `size` bytes, so a run is packets of one size to one
peer, and at most one shorter packet, which is the last. In (receive offload): a buffer holds several datagrams, and a
control message says how large each but the last is.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from typing import Final

from rnsfast.osio.contract import Peer

RUN_BYTES: Final = 65_000  # bytes a run; the headers of the kernel need the rest of 65,535
RUN_PACKETS: Final = 63  # packets a run; kernels before 6.9 refuse more than 64
LONG_RUN_PACKETS: Final = 127  # those since then refuse more than 128

SOL_UDP: Final = 17
UDP_SEGMENT: Final = 103
UDP_GRO: Final = 104
CONTROL: Final = 24  # bytes of control space for one such message
_CMSG: Final = struct.Struct("=Qii")


def run_packets(release: str) -> int:
    """How many packets a kernel of this release takes in a run."""
    found = re.match(r"(\d+)\.(\d+)", release)
    return LONG_RUN_PACKETS if found is not None and (int(found[1]), int(found[2])) >= (6, 9) else RUN_PACKETS


def plan_runs(
    items: Sequence[bytes],
    peers: Sequence[Peer | None] | None,
    first: int,
    stop: int,
    ceiling: int,
    most: int = RUN_PACKETS,
) -> list[tuple[int, int]]:
    """Cut `items[first:stop]` into (start, end) of runs, in order; a packet that fits into none is one by itself.

    Args:
        peers: where each goes; None if all go to the same.
        ceiling: packets larger than this many bytes are no part of a run.
        most: packets a run.
    """
    if peers is None and first < stop:
        sizes = list(map(len, items[first:stop]))
        size = sizes[0]
        if 0 < size <= ceiling and sizes.count(size) == len(sizes):  # the usual case needs no look at each
            step = max(1, min(most, RUN_BYTES // size))
            return [(at, min(at + step, stop)) for at in range(first, stop, step)]
    runs: list[tuple[int, int]] = []
    at = first
    while at < stop:
        size = len(items[at])
        end = at + 1
        if 0 < size <= ceiling:
            limit = min(stop, at + most, at + RUN_BYTES // size)
            peer = None if peers is None else peers[at]
            while end < limit and (peers is None or peers[end] == peer):
                more = len(items[end])
                if more == size:
                    end += 1
                    continue
                if 0 < more < size:
                    end += 1  # the short one, which is the last
                break
        runs.append((at, end))
        at = end
    return runs


def segment_control(size: int) -> bytes:
    """The control message that asks for cutting every `size` bytes, with its padding."""
    return _CMSG.pack(18, SOL_UDP, UDP_SEGMENT) + struct.pack("=H6x", size)


def segment_size(control: bytes | memoryview) -> int:
    """The size of the datagrams in a received buffer; 0 if it is one datagram.

    Walks by what is left, not by what the lengths add up to: those are the system's, and nothing is taken on trust.
    """
    left = memoryview(control)
    while len(left) >= _CMSG.size:
        length, level, kind = _CMSG.unpack_from(left)
        if not _CMSG.size <= length <= len(left):
            return 0
        if (level, kind) == (SOL_UDP, UDP_GRO):
            if length < _CMSG.size + 4:
                return 0
            (size,) = struct.unpack_from("=i", left, _CMSG.size)
            return max(int(size), 0)
        left = left[(length + 7) & ~7 :]
    return 0


def cut(data: memoryview, size: int) -> list[memoryview]:
    """The datagrams in a received buffer. A size of 0, or one that is not smaller than the data, means one."""
    if not 0 < size < len(data):
        return [data]
    return [data[at : at + size] for at in range(0, len(data), size)]
