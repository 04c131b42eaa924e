"""More small packets than a receiver takes one by one: how many are delivered, and what each costs.

Two processes, the sender and the receiver. First the limit of the receiver with one packet a call is measured, then
packets are offered at a multiple of it, to the receiver with one packet a call and with the default batch in turns.
The sender is the same in all: it hands bursts over, and says how fast it really was.

    raw     back end to back end; the receiver parses each packet
    nodes   two nodes with a UDPInterface each; an application takes the packets of a PLAIN destination. The sending
            node gets its packets as a node that forwards does, in its port's queue: an application alone offers less
            than the limit. "Not joined" is a receiver that takes single datagrams (`segmentation = no`)
"""

from __future__ import annotations

import contextlib
import socket
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from osio_far import LOOPBACK, SIZE, Far, load_packets, pour
from osio_rows import Row, row

from rnsfast import Node
from rnsfast.interfaces.common import CommonConfig
from rnsfast.interfaces.udp import UdpConfig, UdpInterface
from rnsfast.osio.backend import open_backend
from rnsfast.osio.contract import Kind
from rnsfast.osio.peers import make_peer

TIMES: Final = 2.5  # what is offered, in limits
SWEEP_TIMES: Final = 8.0  # the same for the sweep
SWEEP: Final = "udp overload, sweep"
FLOOD: Final = 400_000.0  # packets a second to find the limit with
AFTER: Final = 0.3  # seconds that the receiver may work on what has arrived
ONE, MANY, UNJOINED = "one by one", "default batch", "default batch, not joined"
DEFAULT, WITHOUT_RUNS = 0, -1  # instead of a batch: the default; the default, and nothing is joined or cut

Send = Callable[[Sequence[bytes]], Any]


@dataclass(slots=True)
class Delivery:
    """One run."""

    offered: int
    rate: float  # packets a second that were really offered
    delivered: int
    cpu: float  # seconds of the receiver
    calls: int

    @property
    def share(self) -> float:
        return self.delivered / self.offered


@contextlib.contextmanager
def raw(batch: int) -> Iterator[tuple[Far, Send]]:
    with Far("sink", batch=batch or 64) as far:
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        io = open_backend(Kind.DATAGRAM, sock)
        try:
            peer = make_peer(LOOPBACK, far.ready["port"])
            yield far, lambda items: io.send(items, peer)
        finally:
            io.close()


@contextlib.contextmanager
def nodes(batch: int) -> Iterator[tuple[Far, Send]]:
    from interop.harness import free_port

    here, there = free_port(socket.SOCK_DGRAM), free_port(socket.SOCK_DGRAM)
    interface = UdpInterface(
        UdpConfig(
            common=CommonConfig(name="load"),
            listen_ip=LOOPBACK,
            listen_port=here,
            forward_ip=LOOPBACK,
            forward_port=there,
        )
    )
    with Far("node", batch=batch, listen=there, forward=here) as far, Node.from_interfaces([interface]) as node:
        lock, port = node._reactor.lock, interface.port

        def send(items: Sequence[bytes]) -> None:
            with lock:
                port.queue += items
            interface.flush(port)

        yield far, send


KINDS: Final = {"raw": raw, "nodes": nodes}


def run(kind: str, batch: int, packets: Sequence[bytes], rate: float) -> Delivery:
    with KINDS[kind](batch) as (far, send):
        took = pour(send, packets, rate)
        end = perf_counter() + AFTER
        while perf_counter() < end:
            pass  # the sender stays as busy as it was
        found = far.finish()
    return Delivery(len(packets), len(packets) / took, found["packets"], found["cpu"], found["calls"])


def overload(kind: str, rounds: int, seconds: float) -> tuple[list[Row], float]:
    """Rows, and the limit one by one in packets a second."""
    workload = f"udp overload, {kind}"
    limit = find_limit(kind, seconds)
    rate = TIMES * limit
    packets = load_packets(int(rate * seconds))
    modes = {MANY: DEFAULT, UNJOINED: WITHOUT_RUNS} if kind == "nodes" else {MANY: DEFAULT}
    found: dict[str, list[Delivery]] = {ONE: [run(kind, 1, packets, rate)]}
    for _ in range(rounds):
        for pair, batch in modes.items():
            found.setdefault(pair, []).append(run(kind, batch, packets, rate))
            found[ONE].append(run(kind, 1, packets, rate))
    return [row(workload, SIZE, ONE, "limit", limit, "1/s"), *delivery_rows(workload, found)], limit


def find_limit(kind: str, seconds: float) -> float:
    """Packets that are taken one by one in a second of processor time: what a processor of its own could take."""
    packets = load_packets(int(FLOOD * seconds / 2))
    runs = [run(kind, 1, packets, FLOOD) for _ in range(3)]
    return statistics.median(found.delivered / found.cpu for found in runs)


def sweep(batches: Sequence[int], rounds: int, seconds: float, limit: float) -> list[Row]:
    """Back end to back end with every batch size in turns, at a rate that none of them takes."""
    rate = SWEEP_TIMES * limit
    packets = load_packets(int(rate * seconds))
    found: dict[str, list[Delivery]] = {f"batch {batch}": [] for batch in (1, *batches)}
    for _ in range(rounds):
        for batch in (1, *batches):
            found[f"batch {batch}"].append(run("raw", batch, packets, rate))
    return delivery_rows(SWEEP, found)


def delivery_rows(workload: str, found: dict[str, list[Delivery]]) -> list[Row]:
    rows: list[Row] = []
    for pair, runs in found.items():
        figures: tuple[tuple[str, Callable[[Delivery], float], str], ...] = (
            ("offered", lambda run: run.rate, "1/s"),
            ("delivered", lambda run: run.share, "of the offered"),
            ("lost", lambda run: 1 - run.share, "of the offered"),
            ("cpu a bit", lambda run: run.cpu / (max(run.delivered, 1) * SIZE * 8) * 1e9, "ns"),
            ("cpu a packet", lambda run: run.cpu / max(run.delivered, 1) * 1e9, "ns"),
            ("calls a packet", lambda run: run.calls / max(run.delivered, 1), "calls"),
        )
        rows += [row(workload, SIZE, pair, name, statistics.median(map(of, runs)), unit) for name, of, unit in figures]
    return rows
