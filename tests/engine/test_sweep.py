"""Whole tables are looked through in slices, each of which leaves room for others."""

from __future__ import annotations

from rnsfast.engine.engine import Engine
from rnsfast.engine.known import PATH_LIFETIME, Known, Path
from rnsfast.engine.port import Port
from rnsfast.engine.sweep import PAUSE, SLICE, Round, Sweeper
from rnsfast.engine.timers import Timers
from rnsfast.engine.transport.blackhole import Ban
from tests.virtualnet import Recorder


class Table:
    """Numbered keys; remembers the slices."""

    def __init__(self, size: int) -> None:
        self.entries = {n.to_bytes(4, "big"): n for n in range(size)}
        self.slices: list[tuple[float, list[bytes]]] = []
        self.round = Round(lambda: self.entries, lambda keys, now: self.slices.append((now, keys)))

    def seen(self) -> list[bytes]:
        return [key for _, keys in self.slices for key in keys]


def test_a_small_table_is_done_at_once() -> None:
    timers = Timers()
    sweeper, table = Sweeper(timers), Table(SLICE)
    sweeper.begin(table.round, 5.0)
    assert table.seen() == list(table.entries) and len(table.slices) == 1
    assert timers.advance(1e9) > 1e9


def test_a_large_one_in_slices_with_pauses_and_others_after_it() -> None:
    timers = Timers()
    sweeper, large, small = Sweeper(timers), Table(3 * SLICE + 5), Table(10)
    sweeper.begin(large.round, 0.0)
    sweeper.begin(small.round, 0.0)
    assert len(large.slices) == 1 and not small.slices
    now, moments = 0.0, []
    while (due := timers.advance(now)) < 1e9:
        moments.append(due)
        now = due
    assert large.seen() == list(large.entries) and small.seen() == list(small.entries)
    assert all(len(keys) <= SLICE for _, keys in large.slices)
    assert moments == [PAUSE * n for n in range(1, 5)]


def test_a_round_that_is_begun_again_while_it_runs_is_done_once_more() -> None:
    timers = Timers()
    sweeper, table = Sweeper(timers), Table(2 * SLICE)
    for _ in range(50):
        sweeper.begin(table.round, 0.0)
    for n in range(1, 20):
        timers.advance(n * PAUSE * 1.01)
    assert table.seen() == 2 * list(table.entries)


def large_engine() -> tuple[Engine, list[Port]]:
    """A transport node with 5,000 paths over two ports, each destination with its identity's key."""
    engine = Engine(Recorder(), 0.0, transport=True)  # type: ignore[arg-type]
    ports = [Port("one"), Port("two")]
    for port in ports:
        port.online = True
        engine.attach(port, 0.0)
    for n in range(5000):
        key = n.to_bytes(64, "big")
        destination = n.to_bytes(16, "big")
        path = Path(0.0, destination, 1, 1e12, [bytes(10)], ports[n % 2], bytes(32), announce=bytes(200))
        engine.paths.put(destination, path)
        engine.known.put(destination, Known(0.0, bytes(32), key, None))
    return engine, ports


def engine_runs(engine: Engine, now: float, end: float) -> None:
    while now < end:
        now = max(engine.run_timers(now), now)


def test_paths_over_a_port_that_is_gone_are_unusable_at_once_and_go_soon() -> None:
    engine, ports = large_engine()
    theirs = [d for d, path in engine.paths.paths.items() if path.port is ports[0]]
    engine.detach(ports[0], 1.0)
    assert not any(engine.paths.usable(destination) for destination in theirs)
    assert len(engine.paths.paths) > 2500
    engine_runs(engine, 1.0, 1.2)
    assert not set(theirs) & set(engine.paths.paths)


def test_paths_to_a_banned_identity_go_soon() -> None:
    engine, _ = large_engine()
    destination, known = list(engine.known.entries.items())[-1]
    assert engine.paths.usable(destination) is not None
    engine.ban(known.identity().hash, Ban(bytes(16)), 1.0)
    assert destination in engine.paths.paths
    engine_runs(engine, 1.0, 1.2)
    assert destination not in engine.paths.paths and len(engine.paths.paths) == 4999


def test_old_paths_and_then_destinations_nobody_needs_are_forgotten() -> None:
    engine, _ = large_engine()
    late = PATH_LIFETIME + 1000.0
    fresh = next(iter(engine.paths.paths))
    engine.paths.paths[fresh].heard_at = late
    engine_runs(engine, late, late + 1.0)
    assert list(engine.paths.paths) == [fresh] and list(engine.known.entries) == [fresh]
