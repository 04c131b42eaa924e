"""Choosing a back end.  Protocol 09, sections 2 and 11.

The choice is made once, when a socket or device is opened; `caps.backend` has its name, and the first of each kind is
logged. RNSFAST_OSIO in the environment forces a family of back ends: portable, linux, darwin or windows.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import sys as system
from typing import Any, Final, overload

from rnsfast.osio.contract import BatchIO, Kind
from rnsfast.osio.darwin import DarwinDatagramIO
from rnsfast.osio.linux import Libc, LinuxDatagramIO
from rnsfast.osio.portable import PortableDatagramIO
from rnsfast.osio.rio import open_rio, open_socket
from rnsfast.osio.stream import TX_FRAMES, StreamIO
from rnsfast.osio.verdicts import say_once

log = logging.getLogger(__name__)

FAMILIES: Final = ("portable", "linux", "darwin", "windows")
SLOT: Final = 2048  # bytes of the largest packet, unless the interface says otherwise

#: Packets a batch: default, lowest, highest (protocol 09, section 11).
BOUNDS: Final = {
    ("linux", Kind.DATAGRAM): (64, 1, 128),
    ("linux", Kind.TUN): (64, 1, 128),
    ("darwin", Kind.DATAGRAM): (64, 1, 128),
    ("darwin", Kind.TUN): (64, 1, 128),
    ("windows", Kind.DATAGRAM): (32, 1, 64),
    ("windows", Kind.TUN): (32, 1, 64),
    ("portable", Kind.DATAGRAM): (32, 1, 128),
    ("portable", Kind.TUN): (32, 1, 128),
}


def family() -> str:
    """Which back ends are used: that of this system, or the one RNSFAST_OSIO names. OSError if it cannot be."""
    wanted = os.environ.get("RNSFAST_OSIO", "")
    here = _here()
    if not wanted or wanted == here:
        return here
    if wanted == "portable":
        return wanted
    if wanted not in FAMILIES:
        raise OSError(errno.EINVAL, f"RNSFAST_OSIO is {wanted!r}; it takes {', '.join(FAMILIES)}")
    raise OSError(errno.ENOSYS, f"RNSFAST_OSIO={wanted} does not work on this system, which has {here}")


def _here() -> str:
    if system.platform == "linux":
        return "linux" if Libc.usable() else "portable"
    return {"darwin": "darwin", "win32": "windows"}.get(system.platform, "portable")


def bounds(kind: Kind) -> tuple[int, int, int]:
    """Packets a batch: default, lowest and highest that the configuration may ask for."""
    if kind is Kind.STREAM:
        return TX_FRAMES, 1, TX_FRAMES
    return BOUNDS[family(), kind]


def datagram_socket(address_family: int) -> socket.socket:
    """A datagram socket to be bound and given to `open_backend`. Windows asks what it is for when it is made."""
    if family() == "windows":
        return open_socket(address_family)
    return socket.socket(address_family, socket.SOCK_DGRAM)


@overload
def open_backend(
    kind: Kind,
    handle: socket.socket,
    *,
    max_batch: int | None = None,
    max_packet: int = SLOT,
    peers: bool = True,
    segmentation: bool = True,
    coalescing: bool = False,
    sys: Any = None,
) -> BatchIO: ...
@overload
def open_backend(kind: Kind, handle: int, *, max_batch: int | None = None, sys: Any = None) -> BatchIO: ...


def open_backend(
    kind: Kind,
    handle: socket.socket | int,
    *,
    max_batch: int | None = None,
    max_packet: int = SLOT,
    peers: bool = True,
    segmentation: bool = True,
    coalescing: bool = False,
    sys: Any = None,
) -> BatchIO:
    """The best back end for `handle` on this system; it takes the handle over.

    Args:
        kind: what the handle is.
        handle: a connected stream socket, or a bound datagram socket, best from `datagram_socket`. TUN devices are
            opened by `device.open_tun`.
        max_batch: packets a call; None for the default of the back end.
        max_packet: bytes of the largest datagram.
        peers: whether received datagrams say where they come from.
        segmentation, coalescing: whether runs of datagrams may be cut, and put together, by the kernel.
        sys: the system calls to use instead of the real ones, for tests.

    Raises OSError if RNSFAST_OSIO asks for what this system does not have.
    """
    if kind is Kind.TUN or not isinstance(handle, socket.socket):
        raise ValueError("a TUN device is opened by rnsfast.osio.device.open_tun")
    chosen = family()
    io: BatchIO
    if kind is Kind.STREAM:
        io = StreamIO(handle, calls=sys, max_batch=TX_FRAMES if max_batch is None else max_batch)
    else:
        batch = BOUNDS[chosen, kind][0] if max_batch is None else max_batch
        if chosen == "linux":
            io = LinuxDatagramIO(
                handle,
                max_batch=batch,
                max_packet=max_packet,
                peers=peers,
                segmentation=segmentation,
                coalescing=coalescing,
                sys=sys,
            )
        elif chosen == "darwin":
            io = DarwinDatagramIO(handle, max_batch=batch, max_packet=max_packet, peers=peers, sys=sys)
        elif chosen == "windows":
            rio = open_rio(handle, max_batch=batch, max_packet=max_packet, peers=peers, sys=sys)
            io = rio or PortableDatagramIO(handle, max_batch=batch, max_packet=max_packet, peers=peers)
        else:
            io = PortableDatagramIO(handle, max_batch=batch, max_packet=max_packet, peers=peers, sys=sys)
    say_once(f"backend {io.caps.backend}", "back end %s, at most %d packets a call", io.caps.backend, io.caps.max_tx)
    return io
