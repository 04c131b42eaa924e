"""The power fails while a transport node saves under load: field case F11, step 2, with real processes.

A node connects to this test and is sent announces, some with ratchets; it saves again and again, and rotates a ratchet
with every announce of its own. It is killed at random moments of that, and what it had said to be saved must be there.
"""

from __future__ import annotations

import random
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from rnsfast import Identity
from rnsfast.crypto.x25519 import X25519Key
from rnsfast.node.storage import Storage, load_ring
from rnsfast.node.transportstore import PATHS
from rnsfast.wire.announce import Announce, build_announce, random_blob, signed_data
from rnsfast.wire.hdlc import encode_many
from rnsfast.wire.names import destination_hash, name_hash
from rnsfast.wire.packet import ANNOUNCE, CONTEXT_FLAG, CTX_NONE, make_raw
from tests.cli.support import PATIENCE, Running, client, write_config

ANNOUNCES = 400
SLICE = 20  # announces between two pauses

NODE = """
import sys, threading
from pathlib import Path
import rnsfast.engine.destination as destination
import rnsfast.node.node as module
from rnsfast import Identity, Node

module.SAVE_INTERVAL = 0.01
destination.RatchetRing.__init__.__defaults__ = (None, 0.0, 512)  # every announce rotates

class Saving(Node):
    def _save(self):
        with self._reactor.lock:
            known, paths = len(self._engine.known.entries), len(self._engine.paths.paths)
        super()._save()
        print("saved", known, paths, flush=True)

where = Path(sys.argv[1])
with Saving(where) as node:
    inbox = node.register(Identity.load(where / "owner"), "power", "test")
    inbox.enable_ratchets(where / "ring")
    with node._reactor.lock:
        print("up", len(node._engine.known.entries), flush=True)
    pause = threading.Event()
    while True:
        inbox.announce()
        pause.wait(0.02)
"""


def announces(seed: int) -> list[bytes]:
    """Of different destinations, every third with a ratchet."""
    dice = random.Random(seed)
    found = []
    for n in range(ANNOUNCES):
        owner, name = Identity(entropy=dice.randbytes), name_hash("power", str(n))
        ratchet = X25519Key(dice.randbytes(32)).public if n % 3 == 0 else None
        destination = destination_hash(name, owner.hash)
        blob = random_blob(dice.randbytes(5), int(time.time()))
        made = Announce(destination, owner.public_key, name, blob, ratchet, b"", b"data")
        body = build_announce(made, owner.sign(signed_data(made)))
        flags = ANNOUNCE | (CONTEXT_FLAG if ratchet is not None else 0)
        found.append(make_raw(flags, destination, CTX_NONE, body))
    return found


class Load:
    """Sends the announces to whoever connects, from where the last one has come to an end."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]
        self._announces = announces(11)
        self._at = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._stop.is_set():
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            with connection, suppress(OSError):
                while not self._stop.is_set():
                    some = [self._announces[(self._at + n) % ANNOUNCES] for n in range(SLICE)]
                    connection.sendall(encode_many(some))
                    self._at += SLICE
                    self._stop.wait(0.01)

    def close(self) -> None:
        self._stop.set()
        with suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)  # which wakes who accepts
        self.listener.close()
        self._thread.join(PATIENCE)


def kill_again_and_again(directory: Path, times: int) -> None:
    """Start, let it save, kill; look at what is there."""
    load, dice = Load(), random.Random(times)
    write_config(directory, client(load.port, "Line", ingress_control="no"), loglevel=2)
    config = directory / "config"
    config.write_text(config.read_text().replace("[reticulum]\n", "[reticulum]\nenable_transport = yes\n"))
    owner = Identity()
    owner.save(directory / "owner")
    known = paths = ratchets = 0
    transport: bytes | None = None
    try:
        for turn in range(times):
            process = Node(str(directory))
            try:
                assert int(process.line("up").split()[1]) >= known, f"turn {turn}: known destinations are missing"
                for _ in range(dice.randrange(1, 6)):
                    saved = [int(word) for word in process.line("saved").split()[1:]]
                    known, paths = max(known, saved[0]), max(paths, saved[1])
                threading.Event().wait(dice.random() * 0.03)
            finally:
                process.end()
            assert not process.err, f"turn {turn}: {process.err}"
            with Storage(directory) as storage:
                assert len(storage.load_known_destinations()) >= known, f"turn {turn}"
                found = storage.transport_identity()
                assert transport in (None, found.hash), "a node that is another one every time"
                transport = found.hash
                before, ratchets = ratchets, len(storage.load_peer_ratchets(time.time()))  # written as they are heard
                assert ratchets >= before, f"turn {turn}"
                assert (storage.root / PATHS).exists()
            assert len(load_ring(directory / "ring", owner)) >= 1
            left = [path.name for path in directory.rglob("*") if "damaged" in path.name]
            assert not left, f"turn {turn}: {left}"
    finally:
        load.close()
    assert known > ANNOUNCES // 4 and paths > 0 and ratchets > 0


class Node(Running):
    COMMAND = (sys.executable, "-c", NODE)


@pytest.mark.slow
def test_a_node_that_is_killed_while_it_saves_loses_nothing_that_was_saved(tmp_path: Path) -> None:
    kill_again_and_again(tmp_path, 8)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_hundred_times(tmp_path: Path) -> None:
    kill_again_and_again(tmp_path, 100)
