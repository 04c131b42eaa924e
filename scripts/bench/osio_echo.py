"""Round trips to an echo in another process: what a batching receiver adds to a lone packet, and to one in a crowd.

A round is some thousand pings, one at a time. Rounds with the batching echo stand between rounds with the other.
"""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Final, Self

from osio_far import LOOPBACK, PING, SIZE, Far, processors
from osio_rows import Row, row

PATIENCE: Final = 2.0  # seconds until a ping is given up
WARM: Final = 100  # pings that are not counted
PERCENTILES: Final = (50, 95, 99)
PAYLOAD: Final = SIZE - 28  # bytes of a ping's datagram, so that its IP packet has SIZE


@dataclass(slots=True)
class Round:
    """Percentiles of the round trips in microseconds, and pings without an answer."""

    values: dict[int, float]
    lost: int


class Echoes:
    """A client that pings one address."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._sock.connect(address)
        self._sock.settimeout(PATIENCE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._sock.close()

    def measure(self, pings: int) -> Round:
        send, receive = self._sock.send, self._sock.recv
        padding = os.urandom(PAYLOAD - 5)
        took: list[int] = []
        lost = 0
        for i in range(pings + WARM):
            ping = PING + i.to_bytes(4, "big") + padding
            began = perf_counter_ns()
            send(ping)
            try:
                while receive(2048) != ping:
                    pass
            except TimeoutError:
                lost += 1
                continue
            if i >= WARM:
                took.append(perf_counter_ns() - began)
        if len(took) < 2:
            raise RuntimeError("the echo does not answer")
        steps = statistics.quantiles(took, n=100)
        return Round({percent: steps[percent - 1] / 1e3 for percent in PERCENTILES}, lost)


def alternate_rounds(base: str, modes: dict[str, Callable[[], Round]], rounds: int) -> dict[str, list[Round]]:
    """Every mode between two rounds of `base`."""
    found: dict[str, list[Round]] = {name: [] for name in modes}
    for _ in range(rounds):
        found[base].append(modes[base]())
        for name, mode in modes.items():
            if name != base:
                found[name].append(mode())
                found[base].append(modes[base]())
    return found


@contextlib.contextmanager
def pinned() -> Iterator[tuple[int | None, int | None]]:
    """This process on one processor: where its echo must go, and where a load must.

    Two processes take 20 or 70 us a round trip, as the scheduler happens to place them; on one processor the figure is
    that of the code.
    """
    found = processors()
    if found is None:
        yield None, None
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {found[0]})
    try:
        yield found
    finally:
        os.sched_setaffinity(0, before)


def echo_rows(workload: str, base: str, found: dict[str, list[Round]]) -> list[Row]:
    """Medians of each mode; noise is how far the middle half of the baseline's rounds is spread."""
    rows: list[Row] = []
    for pair, results in found.items():
        for percent in PERCENTILES:
            values = [result.values[percent] for result in results]
            rows.append(row(workload, SIZE, pair, f"round trip p{percent}", statistics.median(values), "us"))
            if pair == base and len(values) > 1:
                low, _, high = statistics.quantiles(values, n=4, method="inclusive")
                spread = (high - low) / statistics.median(values)
                rows.append(row(workload, SIZE, pair, f"spread of p{percent}", spread, "of the median"))
        rows.append(row(workload, SIZE, pair, "lost", sum(result.lost for result in results), "pings"))
    return rows


def idle(rounds: int, pings: int, batches: Sequence[int]) -> list[Row]:
    """Nothing but the pings. The echoes run side by side; those that are not asked sleep."""
    with contextlib.ExitStack() as stack:
        cpu, _ = stack.enter_context(pinned())
        modes: dict[str, Callable[[], Round]] = {}
        batched = [(f"batch {batch}", batch) for batch in batches]
        for name, size in (("one by one", 1), *batched, ("recvfrom", 0)):
            far = stack.enter_context(Far("echo", batch=size, cpu=cpu))
            client = stack.enter_context(Echoes((LOOPBACK, far.ready["port"])))
            modes[name] = _bound(client, pings)
        return echo_rows("udp echo, idle", "one by one", alternate_rounds("one by one", modes, rounds))


def _bound(client: Echoes, pings: int) -> Callable[[], Round]:
    return lambda: client.measure(pings)


def loaded(rounds: int, pings: int, batch: int, rate: float) -> list[Row]:
    """Beside a third process that sends `rate` packets a second to the same socket, in bursts."""
    workload = "udp echo, loaded"
    modes: dict[str, Callable[[], Round]] = {}
    with pinned() as (cpu, other):
        for name, size in (("one by one", 1), (f"batch {batch}", batch)):

            def mode(size: int = size) -> Round:
                with (
                    Far("echo", batch=size, cpu=cpu) as far,
                    Echoes((LOOPBACK, far.ready["port"])) as client,
                    Far("flood", port=far.ready["port"], rate=rate, cpu=other),
                ):
                    return client.measure(pings)

            modes[name] = mode
        found = alternate_rounds("one by one", modes, rounds)
    return [*echo_rows(workload, "one by one", found), row(workload, SIZE, "load", "offered", rate, "1/s")]
