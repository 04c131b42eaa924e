#!/usr/bin/env python3
"""A large path table: memory, lookups, saving and loading, and for how long the node's lock is held meanwhile.

    paths.py [--quick] [--paths N] [--json FILE]

Each path has an announce of its own (183 bytes with 16 bytes of application data) and a known destination, as after
hearing it. Announces are files of their own on disk, as in the reference's directory.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path as FilePath
from typing import Any

HERE = FilePath(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))

from rnsfast.crypto.identity import Identity  # noqa: E402
from rnsfast.engine.engine import Engine  # noqa: E402
from rnsfast.engine.known import Known, Path  # noqa: E402
from rnsfast.engine.port import Port  # noqa: E402
from rnsfast.node.storage import Storage  # noqa: E402
from rnsfast.node.transportstore import TransportStore, slices  # noqa: E402
from rnsfast.wire.knowndest import KnownDestination  # noqa: E402
from rnsfast.wire.packet import ANNOUNCE, make_raw, packet_hash  # noqa: E402

COUNT = 100_000


class Ignore:
    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **options: None


class Timed:
    """A lock that remembers for how long it was held at most: by the clock, and in time of the processor."""

    def __init__(self) -> None:
        self._lock, self._since, self.longest = threading.Lock(), (0.0, 0.0), (0.0, 0.0)

    def __enter__(self) -> None:
        self._lock.acquire()
        self._since = time.perf_counter(), time.thread_time()

    def __exit__(self, *exc: object) -> None:
        clock, processor = time.perf_counter() - self._since[0], time.thread_time() - self._since[1]
        self.longest = max(self.longest[0], clock), max(self.longest[1], processor)
        self._lock.release()


class Stalled:
    """A thread that wants to run every millisecond, as a reactor does: for how long it was kept from it at most."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        last = time.perf_counter()
        while not self._end.wait(0.001):
            now = time.perf_counter()
            self.longest, last = max(self.longest, now - last - 0.001), now

    def __enter__(self) -> Stalled:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._end.set()
        self._thread.join()


def rss() -> int:
    """Bytes this process has in memory now."""
    return int(FilePath("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def make_engine() -> Engine:
    return Engine(Ignore(), 0.0, unix_offset=time.time(), transport_identity=Identity(), transport=True)


def fill(engine: Engine, port: Port, count: int) -> None:
    dice = random.Random(1)
    now = time.time()
    for _ in range(count):
        destination, blob = dice.randbytes(16), dice.randbytes(5) + int(now).to_bytes(5, "big")
        key = dice.randbytes(64)
        raw = make_raw(ANNOUNCE, destination, 0, key + dice.randbytes(10) + blob + dice.randbytes(64 + 16))
        digest = packet_hash(raw)
        engine.paths.put(
            destination, Path(now, dice.randbytes(16), 3, now + 604800, [blob], port, digest, announce=raw)
        )
        engine.known.put(destination, Known(now, digest, key, dice.randbytes(16), emitted=int(now)))


def lookups(engine: Engine) -> float:
    """Nanoseconds a lookup, in random order, with a miss for each hit."""
    keys = list(engine.paths.paths)
    random.Random(2).shuffle(keys)
    keys = [key for known in keys[:50_000] for key in (known, known[::-1])]
    get = engine.paths.paths.get
    began = time.perf_counter()
    for key in keys:
        get(key)
    return (time.perf_counter() - began) / len(keys) * 1e9


def known(destination: bytes, entry: Known) -> KnownDestination:
    return KnownDestination(
        destination, entry.heard_at, entry.packet_hash, entry.public_key, entry.app_data, entry.used_at
    )


def load(directory: str) -> dict[str, float]:
    """In a process of its own, so that what is measured is the tables alone."""
    done = subprocess.run(
        [sys.executable, str(HERE / "paths.py"), "--load", directory], capture_output=True, text=True, check=True
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def load_here(directory: str) -> None:
    engine = make_engine()
    before = rss()
    began = time.perf_counter()
    with Storage(FilePath(directory)) as storage:
        entries = storage.load_known_destinations()
        entries.reverse()
        while entries:
            e = entries.pop()
            engine.known.put(e.destination, Known(e.received, e.packet_hash, e.public_key, e.app_data, e.used))
        store = TransportStore(storage, threading.Lock())
        store.load(engine, time.time())
        port = Port("TCPInterface[bench/127.0.0.1:1]")
        port.online = True
        engine.attach(port)
    took = time.perf_counter() - began
    print(json.dumps({"seconds": took, "memory": rss() - before, "paths": len(engine.paths.paths)}))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the same; it takes less than 50 s")
    parser.add_argument("--paths", type=int, default=COUNT)
    parser.add_argument("--json", type=FilePath, help="write rows and ratios here")
    parser.add_argument("--load", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load:
        load_here(options.load)
        return 0
    rows: list[dict[str, Any]] = []

    def row(metric: str, value: float, unit: str) -> None:
        rows.append({"workload": f"{options.paths} paths", "mtu": "", "pair": "ours", "metric": metric, "value": value,
                     "unit": unit})  # fmt: skip
        print(f"{metric:<44} {value:>14,.1f} {unit}")

    engine, port = make_engine(), Port("TCPInterface[bench/127.0.0.1:1]")
    port.online = True
    engine.attach(port)
    before = rss()
    fill(engine, port, options.paths)
    row("memory", (rss() - before) / 1e6, "MB")
    row("memory a path", (rss() - before) / options.paths, "bytes")
    row("lookup", lookups(engine), "ns")
    with tempfile.TemporaryDirectory(prefix="rnsfast-bench-") as directory:
        with Storage(FilePath(directory)) as storage:
            lock = Timed()
            store = TransportStore(storage, lock)
            with Stalled() as idle:
                threading.Event().wait(0.5)
            with Stalled() as stalled:
                began = time.perf_counter()
                store.save(engine)
                row("first save, all announces new", time.perf_counter() - began, "s")
                began = time.perf_counter()
                for path in engine.paths.paths.values():
                    path.heard_at += 1
                store.save(engine)
                row("save, no announce new", time.perf_counter() - began, "s")
                storage.save_known_destinations(
                    stored for part in slices(lock, engine.known.entries, known) for stored in part
                )
            row("lock held at most, clock", lock.longest[0] * 1e3, "ms")
            row("lock held at most, processor", lock.longest[1] * 1e3, "ms")
            row("another thread kept waiting at most", stalled.longest * 1e3, "ms")
            row("the same without saving", idle.longest * 1e3, "ms")
        found = load(directory)
        assert found["paths"] == options.paths
        row("load", found["seconds"], "s")
        row("memory after loading", found["memory"] / 1e6, "MB")
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "ratios": {}}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
