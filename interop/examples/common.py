"""What the example peers share: starting a node, listening, connecting, leaving. Public API of the stock package."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import RNS

APP = "interopexample"


def start(config: str) -> Any:
    return RNS.Reticulum(config, logdest=lambda text: print(text, file=sys.stderr, flush=True))


def listen(aspect: str, joined: Callable[[Any], None]) -> int:
    """Announce a destination, print its hash, call `joined` for every link until the process is interrupted."""
    destination = RNS.Destination(RNS.Identity(), RNS.Destination.IN, RNS.Destination.SINGLE, APP, aspect)
    destination.set_link_established_callback(joined)
    destination.announce()
    print(destination.hash.hex(), flush=True)
    threading.Event().wait()
    return 0


def connect(dest: str, aspect: str, timeout: float = 20.0) -> Any:
    """A link to that destination, ready to be used. Ends the program with one sentence if there is none."""
    target = bytes.fromhex(dest)
    if not RNS.Transport.await_path(target, timeout=timeout):
        leave(1, f"no path to {dest}")
    destination = RNS.Destination(RNS.Identity.recall(target), RNS.Destination.OUT, RNS.Destination.SINGLE, APP, aspect)
    decided = threading.Event()
    link = RNS.Link(destination, lambda link: decided.set(), lambda link: decided.set())
    if not decided.wait(timeout) or link.status != RNS.Link.ACTIVE:
        leave(1, f"no link to {dest}")
    return link


def leave(status: int, reason: str | None = None) -> None:
    """Shut the node down in order, within a few seconds, and end the program."""
    if reason:
        print(reason, file=sys.stderr, flush=True)
    late = threading.Timer(4.0, os._exit, args=(status,))
    late.daemon = True
    late.start()
    RNS.exit(status)
