"""Choosing a back end.  Protocol 09, sections 2 and 11."""

from __future__ import annotations

import socket

from rnsfast.osio.contract import BatchIO, Kind
from rnsfast.osio.stream import TX_FRAMES, StreamCalls, StreamIO


def open_backend(
    kind: Kind, handle: socket.socket, *, max_batch: int | None = None, sys: StreamCalls | None = None
) -> BatchIO:
    """The best back end for `handle` on this system; it takes the handle over.

    Args:
        kind: streams so far. Datagrams and TUN devices get their back ends with the interfaces that use them.
        handle: a connected socket.
        max_batch: packets a submission; None for the default of the back end.
        sys: the system calls to use instead of the real ones, for tests.

    RNSFAST_OSIO=portable or =linux in the environment forces one variant.
    """
    if kind is not Kind.STREAM:
        raise NotImplementedError(f"no back end for {kind.name} yet")
    return StreamIO(handle, calls=sys, max_batch=TX_FRAMES if max_batch is None else max_batch)
