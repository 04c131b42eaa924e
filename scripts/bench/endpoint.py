"""What both endpoints of the stream and call benchmarks share: the application protocol that `rns_side.py` describes.

Knows neither `rns` nor `rnsfast`: an endpoint brings its message classes and a wire.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

APP, ASPECT, STREAM = "rnsfastbench", "channel", 1
HELLO, DONE, PART = 0x0101, 0x0102, 0x0103


class Message(Protocol):
    """One of the three messages: its payload, and the class that makes one of a payload."""

    content: bytes


class Kinds(Protocol):
    """The three message classes of an endpoint."""

    hello: Callable[[bytes], Any]
    done: Callable[[bytes], Any]
    part: Callable[[bytes], Any]


class Wire(Protocol):
    """The channel of one link."""

    kinds: Kinds
    room: int  # payload bytes of a message

    def send(self, messages: Sequence[Any], limit: float) -> None: ...
    def take(self, limit: float) -> Any: ...
    def push(self, content: bytes) -> None: ...


def take_json(wire: Wire, kind: Any, limit: float) -> dict[str, Any]:
    """The next message, which must be of this kind."""
    message = wire.take(limit)
    if not isinstance(message, kind):
        raise TimeoutError(f"expected {kind.__name__}, got {type(message).__name__}")
    answer: dict[str, Any] = json.loads(message.content)
    return answer


def parts(part: Callable[[bytes], Any], call: int, content: bytes, room: int) -> list[Any]:
    """One call or answer as messages of at most `room` bytes."""
    step = room - 5
    cuts = range(0, len(content), step)
    head = call.to_bytes(4, "big")
    return [part(head + bytes((at + step >= len(content),)) + content[at : at + step]) for at in cuts]


def peak_rss() -> int:
    """Bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def say(line: dict[str, Any]) -> None:
    """One line of JSON on standard output."""
    print(json.dumps(line), flush=True)


class Served:
    """One link of the server, on a thread of its own after the set-up."""

    busy = 0  # links that are being served now
    cpu_at_first = 0.0
    counting = threading.Lock()

    def __init__(self, wire: Wire, read: Callable[[int, float], tuple[int, str]], limit: float) -> None:
        self.wire, self.read, self.limit = wire, read, limit
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        kinds = self.wire.kinds
        try:
            wish = take_json(self.wire, kinds.hello, 60)
            with Served.counting:
                Served.busy += 1
                if Served.busy == 1:
                    Served.cpu_at_first = time.process_time()
            try:
                self.wire.send([kinds.hello(b"{}")], self.limit)
                size, digest = (
                    self.read(wish["bytes"], self.limit) if wish["workload"] == "stream" else self.calls(wish)
                )
                spent = time.process_time() - Served.cpu_at_first
                report = {"bytes": size, "sha256": digest, "cpu": spent, "rss": peak_rss(), "timeouts": None}
                self.wire.send([kinds.done(json.dumps(report).encode())], self.limit)
            finally:
                with Served.counting:
                    Served.busy -= 1
        except (OSError, KeyError, ValueError, RuntimeError) as error:
            print(f"server: {error}", file=sys.stderr, flush=True)

    def calls(self, wish: dict[str, Any]) -> tuple[int, str]:
        answer, digest, got = os.urandom(wish["response"]), hashlib.sha256(), 0
        while True:
            message = self.wire.take(self.limit)
            if isinstance(message, self.wire.kinds.done):  # type: ignore[arg-type]
                return got, digest.hexdigest()
            call, last = int.from_bytes(message.content[:4], "big"), message.content[4]
            digest.update(message.content[5:])
            got += len(message.content) - 5
            if last:
                self.wire.send(parts(self.wire.kinds.part, call, answer, self.wire.room), self.limit)


def run_streams(options: argparse.Namespace, wires: Sequence[Wire]) -> dict[str, Any]:
    """One stream on each wire, all at once. The clock runs from the first write to the last Done."""
    contents = [os.urandom(options.bytes) for _ in wires]
    digests = [hashlib.sha256(content).hexdigest() for content in contents]
    for wire in wires:
        wire.send([wire.kinds.hello(json.dumps({"workload": "stream", "bytes": options.bytes}).encode())], 20)
        take_json(wire, wire.kinds.hello, 20)
    cpu, begun = time.process_time(), time.perf_counter()
    pairs = zip(wires, contents, strict=True)
    threads = [threading.Thread(target=wire.push, args=(content,), daemon=True) for wire, content in pairs]
    for thread in threads:
        thread.start()
    end = time.monotonic() + options.limit
    reports = [take_json(wire, wire.kinds.done, max(0.0, end - time.monotonic())) for wire in wires]
    seconds, spent = time.perf_counter() - begun, time.process_time() - cpu
    for thread in threads:
        thread.join(10)
    whole = all(
        report["bytes"] == options.bytes and report["sha256"] == digest
        for report, digest in zip(reports, digests, strict=True)
    )
    total = options.bytes * len(wires)
    return {
        "ok": whole,
        "reason": None if whole else "the server received something else than was sent",
        "bytes": total,
        "seconds": seconds,
        "mb_per_s": total / seconds / 1e6,
        "cpu": spent,
        "server_cpu": max(report["cpu"] for report in reports),
        "server_rss": max(report["rss"] for report in reports),
    }


def run_calls(options: argparse.Namespace, wire: Wire) -> dict[str, Any]:
    """Calls one at a time; the first ones are not counted."""
    request, digest, times = os.urandom(options.request), hashlib.sha256(), []
    wish = {"workload": "rpc", "request": options.request, "response": options.response}
    wire.send([wire.kinds.hello(json.dumps(wish).encode())], 20)
    take_json(wire, wire.kinds.hello, 20)

    def call(number: int) -> None:
        wire.send(parts(wire.kinds.part, number, request, wire.room), 20)
        got, last = 0, False
        while not last:
            content = wire.take(20).content
            if int.from_bytes(content[:4], "big") != number:
                raise TimeoutError("the answer belongs to another call")
            got, last = got + len(content) - 5, bool(content[4])
        if got != options.response:
            raise TimeoutError(f"the answer has {got} bytes instead of {options.response}")
        digest.update(request)

    for number in range(options.warm_up):
        call(number)
    cpu, begun = time.process_time(), time.perf_counter()
    for number in range(options.warm_up, options.warm_up + options.calls):
        at = time.perf_counter()
        call(number)
        times.append(time.perf_counter() - at)
        if at - begun > options.limit:
            break
    seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
    wire.send([wire.kinds.done(b"{}")], 20)
    report = take_json(wire, wire.kinds.done, 20)
    whole = report["sha256"] == digest.hexdigest() and len(times) == options.calls
    ranked = sorted(times)

    def rank(share: float) -> float:
        return ranked[min(len(ranked) - 1, int(len(ranked) * share))] * 1e6

    return {
        "ok": whole,
        "reason": None if whole else f"{len(times)} of {options.calls} calls were answered",
        "bytes": len(times) * (options.request + options.response),
        "seconds": seconds,
        "cpu": cpu,
        "server_cpu": report["cpu"],
        "server_rss": report["rss"],
        "calls": len(times),
        "mean_us": statistics.fmean(times) * 1e6,
        "median_us": statistics.median(times) * 1e6,
        "p95_us": rank(0.95),
        "p99_us": rank(0.99),
        "max_us": ranked[-1] * 1e6,
    }


def serve_until_quit() -> int:
    """Until the end of standard input or a line "quit"."""
    for line in sys.stdin:
        if "quit" in line:
            break
    return 0


def parse_arguments(description: str | None) -> argparse.Namespace:
    """The command line of an endpoint."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", choices=("server", "client"))
    parser.add_argument("--config", required=True, help="configuration directory")
    parser.add_argument("--dest", help="destination hash of the server")
    parser.add_argument("--workload", choices=("stream", "ten", "rpc"), default="stream")
    parser.add_argument("--bytes", type=int, default=1 << 20, help="of one stream")
    parser.add_argument("--links", type=int, help="instead of 1, or of 10 for ten")
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--warm-up", type=int, default=50, help="calls that are not counted")
    parser.add_argument("--request", type=int, default=512, help="bytes")
    parser.add_argument("--response", type=int, default=2048, help="bytes")
    parser.add_argument("--writer", choices=("kind", "default"), default="kind", help="of the reference")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds for one measurement")
    options = parser.parse_args()
    if options.role == "client" and not options.dest:
        parser.error("a client needs --dest")
    options.links = options.links or (10 if options.workload == "ten" else 1)
    return options
