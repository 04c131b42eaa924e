"""rnsfast endpoint of the stream and call benchmarks, either role. Protocol and output are those of `rns_side.py`.

ours_side.py server --config DIR
ours_side.py client --config DIR --dest HASH --workload stream|ten|rpc [--bytes N] [--links N] [--calls N] ...
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import resource
import statistics
import sys
import threading
import time
from typing import Any

from rnsfast import Identity, Link, Node, RnsfastError

APP, ASPECT, STREAM = "rnsfastbench", "channel", 1


class Raw:
    MSGTYPE = 0x0100

    def __init__(self, content: bytes = b"") -> None:
        self.content = content

    def pack(self) -> bytes:
        return self.content

    def unpack(self, raw: bytes) -> None:
        self.content = raw


class Hello(Raw):
    MSGTYPE = 0x0101


class Done(Raw):
    MSGTYPE = 0x0102


class Part(Raw):
    MSGTYPE = 0x0103


def parts(call: int, content: bytes, room: int) -> list[Part]:
    """One call or answer as messages of at most `room` bytes."""
    step = room - 5
    head = call.to_bytes(4, "big")
    cuts = range(0, len(content), step)
    return [Part(head + bytes((at + step >= len(content),)) + content[at : at + step]) for at in cuts]


def peak_rss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class Wire:
    """The channel of one link."""

    def __init__(self, link: Link) -> None:
        self.link, self.channel = link, link.channel
        self.channel.register(Hello, Done, Part)

    def take(self, limit: float) -> Raw:
        message: Raw = self.channel.receive(limit)
        return message

    def take_json(self, kind: type[Raw], limit: float) -> dict[str, Any]:
        message = self.take(limit)
        if not isinstance(message, kind):
            raise TimeoutError(f"expected {kind.__name__}, got {type(message).__name__}")
        answer: dict[str, Any] = json.loads(message.content)
        return answer


# ------------------------------------------------------------------------------------------------------------- server
class Served:
    """One link of the server, on a thread of its own after the set-up."""

    busy = 0
    cpu_at_first = 0.0
    counting = threading.Lock()

    def __init__(self, link: Link, limit: float) -> None:
        self.reader = link.open_reader(STREAM)
        self.wire, self.limit = Wire(link), limit
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        try:
            wish = self.wire.take_json(Hello, 60)
            with Served.counting:
                Served.busy += 1
                if Served.busy == 1:
                    Served.cpu_at_first = time.process_time()
            try:
                self.wire.channel.send(Hello(b"{}"), self.limit)
                size, digest = self.stream(wish["bytes"]) if wish["workload"] == "stream" else self.calls(wish)
                spent = time.process_time() - Served.cpu_at_first
                report = {"bytes": size, "sha256": digest, "cpu": spent, "rss": peak_rss(), "timeouts": None}
                self.wire.channel.send(Done(json.dumps(report).encode()), self.limit)
            finally:
                with Served.counting:
                    Served.busy -= 1
        except (TimeoutError, KeyError, ValueError, RnsfastError) as error:
            print(f"server: {error}", file=sys.stderr, flush=True)

    def stream(self, total: int) -> tuple[int, str]:
        got, digest = 0, hashlib.sha256()
        self.reader.timeout = self.limit
        while got < total and (content := self.reader.read(1 << 20)):
            got += len(content)
            digest.update(content)
        return got, digest.hexdigest()

    def calls(self, wish: dict[str, Any]) -> tuple[int, str]:
        answer, digest, got = os.urandom(wish["response"]), hashlib.sha256(), 0
        while True:
            message = self.wire.take(self.limit)
            if isinstance(message, Done):
                return got, digest.hexdigest()
            call, last = int.from_bytes(message.content[:4], "big"), message.content[4]
            digest.update(message.content[5:])
            got += len(message.content) - 5
            if last:
                self.wire.channel.send_many(parts(call, answer, self.wire.channel.mdu), self.limit)


def serve(node: Node, options: argparse.Namespace) -> int:
    inbox = node.register(Identity(), APP, ASPECT)
    inbox.on_link(lambda link: Served(link, options.limit))
    inbox.announce()
    say({"event": "ready", "dest": inbox.hash.hex()})
    for line in sys.stdin:
        if "quit" in line:
            break
        if "announce" in line:
            inbox.announce()
    return 0


# ------------------------------------------------------------------------------------------------------------- client
def push(wire: Wire, content: bytes) -> None:
    with wire.link.open_writer(STREAM, compression="never") as writer:
        writer.write(content)


def run_streams(options: argparse.Namespace, wires: list[Wire]) -> dict[str, Any]:
    contents = [os.urandom(options.bytes) for _ in wires]
    digests = [hashlib.sha256(content).hexdigest() for content in contents]
    for wire in wires:
        wire.channel.send(Hello(json.dumps({"workload": "stream", "bytes": options.bytes}).encode()), 20)
        wire.take_json(Hello, 20)
    cpu, begun = time.process_time(), time.perf_counter()
    threads = [threading.Thread(target=push, args=pair) for pair in zip(wires, contents, strict=True)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + options.limit
    reports = [wire.take_json(Done, max(0.0, end - time.monotonic())) for wire in wires]
    seconds = time.perf_counter() - begun
    spent = time.process_time() - cpu
    for thread in threads:
        thread.join()
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
    request, digest, times = os.urandom(options.request), hashlib.sha256(), []
    wish = {"workload": "rpc", "request": options.request, "response": options.response}
    wire.channel.send(Hello(json.dumps(wish).encode()), 20)
    wire.take_json(Hello, 20)

    def call(number: int) -> None:
        wire.channel.send_many(parts(number, request, wire.channel.mdu), 20)
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
    wire.channel.send(Done(b"{}"), 20)
    report = wire.take_json(Done, 20)
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


def measure(node: Node, options: argparse.Namespace) -> int:
    links = options.links or (10 if options.workload == "ten" else 1)
    result: dict[str, Any] = {"ok": False, "workload": options.workload, "links": links, "writer": "rnsfast"}
    target = bytes.fromhex(options.dest)
    opened: list[Link] = []
    try:
        opened = [node.connect(target, APP, ASPECT, timeout=20) for _ in range(links)]
        wires = [Wire(link) for link in opened]
        room = min(16384, wires[0].channel.mdu - 2)
        result.update(mtu=opened[0].mtu, mdu=opened[0].mdu, payload=room, timeouts=None)
        result.update(run_calls(options, wires[0]) if options.workload == "rpc" else run_streams(options, wires))
    except (TimeoutError, RnsfastError) as error:
        result["reason"] = str(error)
    result["rss"] = peak_rss()
    say(result)
    for link in opened:
        link.close()
    return 0 if result["ok"] else 1


# ------------------------------------------------------------------------------------------------------------- common
def say(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    parser.add_argument("--writer", choices=("kind", "default"), help="for the reference only, accepted and ignored")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds for one measurement")
    options = parser.parse_args()
    if options.role == "client" and not options.dest:
        parser.error("a client needs --dest")
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    with Node(options.config) as node:
        return serve(node, options) if options.role == "server" else measure(node, options)


if __name__ == "__main__":
    sys.exit(main())
