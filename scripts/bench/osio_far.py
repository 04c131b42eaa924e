"""The far side of the osio benchmarks: a process that echoes, counts, sends at a rate, or is a node.

    osio_far.py ROLE '{"option": value, ...}'

It says {"event": "ready", ...} in one line and, when its standard input ends, what it has counted in another. `Far` is
the handle of the process that starts it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter, process_time, sleep
from types import TracebackType
from typing import Any, Final, Self

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from rnsfast.osio.backend import open_backend
from rnsfast.osio.contract import BatchIO, Kind, Peer, RxBatch
from rnsfast.osio.memory import keep_heap
from rnsfast.osio.peers import make_peer
from rnsfast.osio.poller import READ, open_poller
from rnsfast.wire.packet import DATA, PLAIN, make_raw, parse_packet

LIMIT: Final = 120.0  # seconds that a far side may live
LOOPBACK: Final = "127.0.0.1"
ROOM: Final = 4 << 20  # bytes of the receive buffer, as UDPInterface asks for
SIZE: Final = 64  # bytes of a packet of the load
BURST: Final = 64  # packets sent at a time
PING, LOAD = b"P", b"L"  # first byte of what an echo answers, and of what it only takes
NAME: Final = ("rnsfastbench", "load")
_SO_RCVBUFFORCE: Final = 33

Handle = Callable[[RxBatch], None]


class Far:
    """A started far side. Ends it by its own handle, whatever happens."""

    def __init__(self, role: str, pass_fds: Sequence[int] = (), **options: Any) -> None:
        command = [sys.executable, str(Path(__file__)), role, json.dumps(options)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=tuple(pass_fds)
        )
        self._late = threading.Timer(LIMIT, self._process.kill)
        self._late.daemon = True
        self._late.start()
        self.ready = self._line()

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.kill()
            raise RuntimeError("the far side ended before it answered")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def finish(self) -> dict[str, Any]:
        """End its input, and get what it has counted."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._line()

    def kill(self) -> None:
        self._late.cancel()
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.kill()


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def listening() -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE if sys.platform == "linux" else socket.SO_RCVBUF, ROOM)
    except OSError:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, ROOM)
    sock.bind((LOOPBACK, 0))
    return sock


def serve(io: BatchIO, handle: Handle, **ready: Any) -> None:
    """Poll, receive once, handle; until standard input ends. Then what is still queued."""
    keep_heap()
    batch, poller = io.make_batch(), open_poller()
    fd, recv, wait = io.fileno(), io.recv, poller.wait
    poller.watch(fd, READ)
    poller.watch(0, READ)
    say(event="ready", backend=io.caps.backend, **ready)
    going = True
    while going:
        for number, _ in wait(None):
            if number == 0:
                going = False
            elif recv(batch):
                handle(batch)
    while recv(batch):
        handle(batch)
    poller.close()


def echo(options: dict[str, Any]) -> None:
    """Sends back what begins as a ping; takes everything else. `batch` 0: by the standard library, one by one."""
    sock = listening()
    port = sock.getsockname()[1]
    if not options["batch"]:
        _echo_plainly(sock, port)
        return
    io = open_backend(Kind.DATAGRAM, sock, max_batch=options["batch"])

    def handle(batch: RxBatch) -> None:
        answers: list[bytes] = []
        peers: list[Peer] = []
        for item, peer in zip(batch.take_all(), batch.peers, strict=True):
            if item[:1] == PING and peer is not None:
                answers.append(item)
                peers.append(peer)
        if len(answers) == 1:
            io.send_one(answers[0], peers[0])
        elif answers:
            io.send(answers, peers)

    serve(io, handle, port=port)
    say(packets=io.stats.rx_packets, calls=io.stats.rx_calls)
    io.close()


def _echo_plainly(sock: socket.socket, port: int) -> None:
    sock.setblocking(False)
    poller = open_poller()
    poller.watch(sock.fileno(), READ)
    poller.watch(0, READ)
    say(event="ready", backend="recvfrom", port=port)
    packets, going = 0, True
    while going:
        for number, _ in poller.wait(None):
            if number == 0:
                going = False
                continue
            with contextlib.suppress(BlockingIOError):
                item, address = sock.recvfrom(2049)
                packets += 1
                if item[:1] == PING:
                    sock.sendto(item, address)
    say(packets=packets, calls=packets)
    poller.close()
    sock.close()


def echo_tun(options: dict[str, Any]) -> None:
    """The same on an open TUN device: IPv4 packets go back with their addresses swapped."""
    from rnsfast.osio.tun import TunIO

    io = TunIO(options["fd"], max_batch=options["batch"])

    def handle(batch: RxBatch) -> None:
        answers = [turned(item) for item in batch.take_all() if item[28:29] == PING]
        if len(answers) == 1:
            io.send_one(answers[0])
        elif answers:
            io.send(answers)

    serve(io, handle)
    say(packets=io.stats.rx_packets, calls=io.stats.rx_calls)
    io.close()


def turned(packet: bytes) -> bytes:
    """An IPv4 packet with UDP in it, back to its sender: no sum changes when two addresses and two ports swap."""
    return packet[:12] + packet[16:20] + packet[12:16] + packet[22:24] + packet[20:22] + packet[24:]


def sink(options: dict[str, Any]) -> None:
    """Counts packets, with the work of parsing each. `batch`: packets a call."""
    sock = listening()
    io = open_backend(Kind.DATAGRAM, sock, max_batch=options["batch"], peers=False)
    count = 0

    def handle(batch: RxBatch) -> None:
        nonlocal count
        for item in batch.take_all():
            parse_packet(item)
            count += 1

    began = process_time()
    serve(io, handle, port=sock.getsockname()[1])
    say(packets=count, cpu=process_time() - began, calls=io.stats.rx_calls)
    io.close()


def flood(options: dict[str, Any]) -> None:
    """Sends a load of small datagrams that no echo answers, until its input ends. `rate`: packets a second."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    io = open_backend(Kind.DATAGRAM, sock, max_batch=BURST)
    peer, items = make_peer(LOOPBACK, options["port"]), [LOAD * SIZE] * options.get("burst", BURST)
    stop = threading.Event()

    def listen() -> None:
        sys.stdin.read()
        stop.set()

    threading.Thread(target=listen, daemon=True).start()
    say(event="ready")
    began, sent = perf_counter(), 0
    while not stop.is_set():
        io.send(items, peer)
        sent += len(items)
        ahead = sent / options["rate"] - (perf_counter() - began)
        if ahead > 0:
            sleep(ahead)
    say(packets=sent, seconds=perf_counter() - began)
    io.close()


def load_packets(count: int) -> list[bytes]:
    """Distinct packets of SIZE bytes to the PLAIN destination of the load; a node drops what it has seen before."""
    from rnsfast.wire.names import destination_hash, name_hash

    destination = destination_hash(name_hash(*NAME), None)
    flags = PLAIN << 2 | DATA
    padding = bytes(SIZE - 19 - 8)
    return [make_raw(flags, destination, 0, i.to_bytes(8, "big") + padding) for i in range(count)]


def pour(send: Callable[[Sequence[bytes]], Any], packets: Sequence[bytes], rate: float) -> float:
    """Hand the packets over in bursts at `rate` a second, 0 for as fast as can be. Seconds it took."""
    began = perf_counter()
    for at in range(0, len(packets), BURST):
        send(packets[at : at + BURST])
        if rate:
            due = began + (at + BURST) / rate
            while perf_counter() < due:
                pass
    return perf_counter() - began


def node(options: dict[str, Any]) -> None:
    """A node with a UDPInterface; its application counts the packets that come.

    `batch`: its option of that name; 0 for the default, -1 for the default without joined packets.
    """
    from interop.harness import udp, write_config
    from rnsfast import PLAIN as PLAIN_KIND
    from rnsfast import Node

    with tempfile.TemporaryDirectory(prefix="rnsfast-bench-") as directory:
        batch = options["batch"]
        extra: dict[str, object] = {"batch": batch} if batch > 0 else {"segmentation": batch == 0}
        config = write_config(Path(directory), [udp(options["listen"], options["forward"], **extra)])
        with Node(config) as here:
            count = 0

            def arrived(data: bytes) -> None:
                nonlocal count
                count += 1

            here.register(None, *NAME, kind=PLAIN_KIND).on_packet(arrived)
            began = process_time()
            say(event="ready")
            sys.stdin.read()
            connection = here.status()["interfaces"][0]["connection"]
            spent = process_time() - began
            say(packets=count, cpu=spent, calls=connection["rx_calls"])


ROLES: Final = {"echo": echo, "echo-tun": echo_tun, "sink": sink, "flood": flood, "node": node}


def processors() -> tuple[int, int] | None:
    """One for those who talk to each other, one for a load beside them; None where processes cannot be told."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    allowed = sorted(os.sched_getaffinity(0))
    return (allowed[-1], allowed[0]) if len(allowed) > 1 else None


def main() -> None:
    options = json.loads(sys.argv[2])
    if options.get("cpu") is not None:
        os.sched_setaffinity(0, {options["cpu"]})
    ROLES[sys.argv[1]](options)


if __name__ == "__main__":
    main()
