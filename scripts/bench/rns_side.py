"""Reference endpoint of the stream and call benchmarks: either role, on the stock `rns` package.

    rns_side.py server --config DIR [--writer kind|default]
    rns_side.py client --config DIR --dest HASH --workload stream|ten|rpc [--bytes N] [--links N] [--calls N]
                       [--warm-up N] [--writer kind|default] [--limit S]

The configuration directory decides interface, port and link MTU (`link_mtu_discovery = no` on the client gives 500).

The application protocol, so that any other endpoint can take either role
-------------------------------------------------------------------------
Destination: SINGLE, app `rnsfastbench`, aspect `channel`. The server announces it and answers path requests; the client
opens one link for each stream, or one for all calls. Everything runs on the channel of the link.

    type    name   from     payload
    0x0101  Hello  client   JSON object: `workload` "stream" or "rpc"; stream: `bytes`, how many will follow; rpc:
                            `request` and `response`, content bytes of a call and of its answer
    0x0101  Hello  server   `{}`: the reader of stream 1 is open, begin
    0x0102  Done   client   `{}`: rpc only, no more calls
    0x0102  Done   server   JSON object: `bytes`, `sha256` (hex; of the stream, or of all request contents in order),
                            `cpu` (seconds of processor time of the process since a Hello came while no other link was
                            being served), `rss` (peak, bytes), `timeouts` (message timeouts, or null: not counted)
    0x0103  Part   both     call id (4 bytes, big endian), last (1 byte, 1 on the last part of the call), content

Workload stream: after the server's Hello the client writes exactly `bytes` bytes to stream 1 and an end mark; when they
are all there the server sends Done. The client's clock runs from its first write to Done.
Workload rpc: a call is `request` bytes, its answer `response` bytes under the same id. Content that does not fit into
one message (channel MDU - 5) is cut into parts of that size, in order. One call at a time. The content of answers is
free, but the same for every call. After the last call the client sends Done and the server answers with its Done.
"ten" is ten links in one client process, one stream on each, all at once. The client closes its links.

Lines
-----
The server prints `{"event": "ready", "dest": HASH}` and serves until the end of its input or a line "quit". The client
prints one JSON object, its last line, and leaves with status 0 if everything arrived:

    ok, reason, workload, bytes, links, seconds, mb_per_s (10^6), cpu, rss, server_cpu, server_rss, mtu, payload,
    timeouts (always null here), and for rpc: calls, mean_us, median_us, p95_us, p99_us, max_us

Writers: "kind" makes no compression attempts and asks for readiness every 0.5 ms; "default" is what a program does that
knows nothing (buffered writer, three compression attempts a chunk).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import queue
import resource
import statistics
import sys
import threading
import time
from typing import Any

import RNS
from RNS.Buffer import StreamDataMessage

APP, ASPECT, STREAM = "rnsfastbench", "channel", 1
POLL = 0.0005  # seconds between looks at readiness
LEAVE_WITHIN = 3.0  # seconds


class Raw(RNS.MessageBase):
    MSGTYPE = 0x0100

    def __init__(self, content: bytes = b"") -> None:
        self.content = content

    def pack(self) -> bytes:
        return self.content

    def unpack(self, raw: bytes) -> None:
        self.content = bytes(raw)


class Hello(Raw):
    MSGTYPE = 0x0101


class Done(Raw):
    MSGTYPE = 0x0102


class Part(Raw):
    MSGTYPE = 0x0103


def parts(call: int, content: bytes, room: int) -> list[Part]:
    """One call or answer as messages of at most `room` bytes."""
    step = room - 5
    cuts = range(0, len(content), step)
    head = call.to_bytes(4, "big")
    return [Part(head + bytes((at + step >= len(content),)) + content[at : at + step]) for at in cuts]


def peak_rss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class Wire:
    """The channel of one link with a queue of what came in."""

    def __init__(self, link: Any) -> None:
        self.link = link
        self.came: queue.Queue[Raw] = queue.Queue()
        self.channel = link.get_channel()
        for kind in (Hello, Done, Part):
            self.channel.register_message_type(kind)
        self.bell = threading.Event()
        self.channel.add_message_handler(self._on_message)

    def _on_message(self, message: Any) -> bool:
        if isinstance(message, Raw):
            self.came.put(message)
            return True
        return False

    def send(self, message: Any, limit: float = 60.0) -> None:
        end = time.monotonic() + limit
        while time.monotonic() < end and self.link.status != RNS.Link.CLOSED:
            if self.channel.is_ready_to_send():
                try:
                    self.channel.send(message)
                    return
                except RNS.Channel.ChannelException as error:
                    if error.type != RNS.Channel.CEType.ME_LINK_NOT_READY:
                        raise
            time.sleep(POLL)
        raise TimeoutError("a message found no room on the channel")

    def take(self, limit: float) -> Raw:
        try:
            return self.came.get(timeout=limit)
        except queue.Empty:
            raise TimeoutError(f"nothing came within {limit:.0f} s") from None

    def take_json(self, kind: type[Raw], limit: float) -> dict[str, Any]:
        message = self.take(limit)
        if not isinstance(message, kind):
            raise TimeoutError(f"expected {kind.__name__}, got {type(message).__name__}")
        answer: dict[str, Any] = json.loads(message.content)
        return answer


# ------------------------------------------------------------------------------------------------------------- server
class Served:
    """One link of the server, on a thread of its own after the set-up."""

    busy = 0  # links that are being served now
    cpu_at_first = 0.0
    counting = threading.Lock()

    def __init__(self, link: Any, limit: float) -> None:
        self.wire, self.limit = Wire(link), limit
        self.bell = threading.Event()
        self.reader = RNS.Buffer.create_reader(STREAM, self.wire.channel, lambda ready: self.bell.set())
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        try:
            wish = self.wire.take_json(Hello, 60)
        except (TimeoutError, ValueError) as error:
            print(f"server: {error}", file=sys.stderr, flush=True)
            return
        with Served.counting:
            Served.busy += 1
            if Served.busy == 1:
                Served.cpu_at_first = time.process_time()
        try:
            self.wire.send(Hello(b"{}"))
            size, digest = self.stream(wish["bytes"]) if wish["workload"] == "stream" else self.calls(wish)
            spent = time.process_time() - Served.cpu_at_first
            report = {"bytes": size, "sha256": digest, "cpu": spent, "rss": peak_rss(), "timeouts": None}
            self.wire.send(Done(json.dumps(report).encode()))
        except (TimeoutError, KeyError, ValueError) as error:
            print(f"server: {error}", file=sys.stderr, flush=True)
        finally:
            with Served.counting:
                Served.busy -= 1

    def stream(self, total: int) -> tuple[int, str]:
        got, digest, end = 0, hashlib.sha256(), time.monotonic() + self.limit
        while got < total and (left := end - time.monotonic()) > 0:
            self.bell.wait(left)
            self.bell.clear()
            while content := self.reader.read(65536):
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
                for piece in parts(call, answer, self.wire.channel.mdu):
                    self.wire.send(piece)


def serve(options: argparse.Namespace) -> int:
    destination = RNS.Destination(RNS.Identity(), RNS.Destination.IN, RNS.Destination.SINGLE, APP, ASPECT)
    served: list[Served] = []
    destination.set_link_established_callback(lambda link: served.append(Served(link, options.limit)))
    destination.announce()
    say({"event": "ready", "dest": destination.hash.hex()})
    for line in sys.stdin:
        if "quit" in line:
            break
    return 0


# ------------------------------------------------------------------------------------------------------------- client
def connect(options: argparse.Namespace) -> Wire:
    target = bytes.fromhex(options.dest)
    if not RNS.Transport.has_path(target) and not RNS.Transport.await_path(target, timeout=20):
        raise TimeoutError("no path to the server")
    identity = RNS.Identity.recall(target)
    destination = RNS.Destination(identity, RNS.Destination.OUT, RNS.Destination.SINGLE, APP, ASPECT)
    up = threading.Event()
    link = RNS.Link(destination, lambda link: up.set())
    if not up.wait(20):
        raise TimeoutError("no link to the server")
    return Wire(link)


def push(wire: Wire, content: bytes, writer: str, keep: list[Any]) -> None:
    view, at = memoryview(content), 0
    if writer == "default":
        buffered = RNS.Buffer.create_writer(STREAM, wire.channel)
        keep.append(buffered)  # one that is collected sends end marks of its own
        while at < len(content):
            at += buffered.write(view[at : at + 65536])
        buffered.flush()
    else:
        RNS.RawChannelWriter.COMPRESSION_TRIES = 1  # of the class: the writer does not look at its own attribute
        raw = RNS.RawChannelWriter(STREAM, wire.channel)
        keep.append(raw)
        while at < len(content) and wire.link.status != RNS.Link.CLOSED:
            if wire.channel.is_ready_to_send():
                at += raw.write(bytes(view[at : at + 16384]))
            else:
                time.sleep(POLL)
    wire.send(StreamDataMessage(STREAM, b"", eof=True))


def run_streams(options: argparse.Namespace, wires: list[Wire]) -> dict[str, Any]:
    contents = [os.urandom(options.bytes) for _ in wires]
    digests = [hashlib.sha256(content).hexdigest() for content in contents]
    for wire in wires:
        wire.send(Hello(json.dumps({"workload": "stream", "bytes": options.bytes}).encode()))
        wire.take_json(Hello, 20)
    keep: list[Any] = []
    cpu, begun = time.process_time(), time.perf_counter()
    for wire, content in zip(wires, contents, strict=True):
        threading.Thread(target=push, args=(wire, content, options.writer, keep), daemon=True).start()
    end = time.monotonic() + options.limit
    reports = [wire.take_json(Done, max(0.0, end - time.monotonic())) for wire in wires]
    seconds = time.perf_counter() - begun
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
        "cpu": time.process_time() - cpu,
        "server_cpu": max(report["cpu"] for report in reports),
        "server_rss": max(report["rss"] for report in reports),
    }


def run_calls(options: argparse.Namespace, wire: Wire) -> dict[str, Any]:
    request, digest, times = os.urandom(options.request), hashlib.sha256(), []
    wish = {"workload": "rpc", "request": options.request, "response": options.response}
    wire.send(Hello(json.dumps(wish).encode()))
    wire.take_json(Hello, 20)

    def call(number: int) -> None:
        for piece in parts(number, request, wire.channel.mdu):
            wire.send(piece)
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
    wire.send(Done(b"{}"))
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


def measure(options: argparse.Namespace) -> int:
    links = options.links or (10 if options.workload == "ten" else 1)
    result: dict[str, Any] = {"ok": False, "workload": options.workload, "links": links, "writer": options.writer}
    try:
        wires = [connect(options) for _ in range(links)]
        room = min(16384, wires[0].channel.mdu - 2)
        result.update(mtu=wires[0].link.mtu, mdu=wires[0].link.mdu, payload=room, timeouts=None)
        result.update(run_calls(options, wires[0]) if options.workload == "rpc" else run_streams(options, wires))
    except TimeoutError as error:
        result["reason"] = str(error)
    result["rss"] = peak_rss()
    say(result)
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
    parser.add_argument("--writer", choices=("kind", "default"), default="kind")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds for one measurement")
    options = parser.parse_args()
    if options.role == "client" and not options.dest:
        parser.error("a client needs --dest")
    RNS.Reticulum(options.config, logdest=lambda text: print(text, file=sys.stderr, flush=True))
    return serve(options) if options.role == "server" else measure(options)


if __name__ == "__main__":
    status = main()
    late = threading.Timer(LEAVE_WITHIN, os._exit, args=(status,))
    late.daemon = True
    late.start()
    RNS.exit(status)
