"""What an interface of a bitrate carries in one packet.  Protocol 01, section 11; protocol 03, section 9.1."""

from __future__ import annotations

from typing import Final

#: (bit/s at least, hardware MTU in bytes). Both ends of a link meet at the smaller one, so the steps are on the wire.
_STEPS: Final = (
    (1_000_000_000, 524288),
    (750_000_000, 262144),
    (400_000_000, 131072),
    (200_000_000, 65536),
    (100_000_000, 32768),
    (10_000_000, 16384),
    (5_000_000, 8192),
    (2_000_000, 4096),
    (1_000_000, 2048),
    (62_500, 1024),
)


def hw_mtu_for_bitrate(bitrate: float) -> int | None:
    """Hardware MTU in bytes for bit/s; None below 62500: such an interface carries 500 and is not upgradable."""
    for least, mtu in _STEPS:
        if bitrate >= least:
            return mtu
    return None
