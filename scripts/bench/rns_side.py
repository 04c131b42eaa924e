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
import os
import queue
import sys
import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import endpoint
import RNS
from RNS.Buffer import StreamDataMessage

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
    MSGTYPE = endpoint.HELLO


class Done(Raw):
    MSGTYPE = endpoint.DONE


class Part(Raw):
    MSGTYPE = endpoint.PART


class Wire:
    """The channel of one link with a queue of what came in."""

    kinds = SimpleNamespace(hello=Hello, done=Done, part=Part)

    def __init__(self, link: Any, writer: str) -> None:
        self.link, self.writer = link, writer
        self.came: queue.Queue[Raw] = queue.Queue()
        self.channel = link.get_channel()
        for kind in (Hello, Done, Part):
            self.channel.register_message_type(kind)
        self.channel.add_message_handler(self._on_message)
        self.room = self.channel.mdu
        self.keep: list[Any] = []  # writers: one that is collected sends end marks of its own

    def _on_message(self, message: Any) -> bool:
        if isinstance(message, Raw):
            self.came.put(message)
            return True
        return False

    def send(self, messages: Sequence[Any], limit: float = 60.0) -> None:
        for message in messages:
            self._send(message, limit)

    def _send(self, message: Any, limit: float) -> None:
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

    def push(self, content: bytes) -> None:
        view, at = memoryview(content), 0
        if self.writer == "default":
            buffered = RNS.Buffer.create_writer(endpoint.STREAM, self.channel)
            self.keep.append(buffered)
            while at < len(content):
                at += buffered.write(view[at : at + 65536])
            buffered.flush()
        else:
            RNS.RawChannelWriter.COMPRESSION_TRIES = 1  # of the class: the writer does not look at its own attribute
            raw = RNS.RawChannelWriter(endpoint.STREAM, self.channel)
            self.keep.append(raw)
            while at < len(content) and self.link.status != RNS.Link.CLOSED:
                if self.channel.is_ready_to_send():
                    at += raw.write(bytes(view[at : at + 16384]))
                else:
                    time.sleep(POLL)
        self._send(StreamDataMessage(endpoint.STREAM, b"", eof=True), 60.0)


def arrived(link: Any, options: argparse.Namespace, served: list[Any]) -> None:
    """In the established callback: everything is open before the first message is processed."""
    wire, bell = Wire(link, options.writer), threading.Event()
    reader = RNS.Buffer.create_reader(endpoint.STREAM, wire.channel, lambda ready: bell.set())

    def read(total: int, limit: float) -> tuple[int, str]:
        got, digest, end = 0, hashlib.sha256(), time.monotonic() + limit
        while got < total and (left := end - time.monotonic()) > 0:
            bell.wait(left)
            bell.clear()
            while content := reader.read(65536):
                got += len(content)
                digest.update(content)
        return got, digest.hexdigest()

    served.append((endpoint.Served(wire, read, options.limit), reader))


def serve(options: argparse.Namespace) -> int:
    destination = RNS.Destination(
        RNS.Identity(), RNS.Destination.IN, RNS.Destination.SINGLE, endpoint.APP, endpoint.ASPECT
    )
    served: list[Any] = []
    destination.set_link_established_callback(lambda link: arrived(link, options, served))
    destination.announce()
    endpoint.say({"event": "ready", "dest": destination.hash.hex()})
    return endpoint.serve_until_quit()


def connect(options: argparse.Namespace) -> Wire:
    target = bytes.fromhex(options.dest)
    if not RNS.Transport.has_path(target) and not RNS.Transport.await_path(target, timeout=20):
        raise TimeoutError("no path to the server")
    identity = RNS.Identity.recall(target)
    destination = RNS.Destination(identity, RNS.Destination.OUT, RNS.Destination.SINGLE, endpoint.APP, endpoint.ASPECT)
    up = threading.Event()
    link = RNS.Link(destination, lambda link: up.set())
    if not up.wait(20):
        raise TimeoutError("no link to the server")
    return Wire(link, options.writer)


def measure(options: argparse.Namespace) -> int:
    result: dict[str, Any] = {
        "ok": False, "workload": options.workload, "links": options.links, "writer": options.writer
    }  # fmt: skip
    try:
        wires = [connect(options) for _ in range(options.links)]
        link = wires[0].link
        result.update(mtu=link.mtu, mdu=link.mdu, payload=min(16384, wires[0].room - 2), timeouts=None)
        calls = options.workload == "rpc"
        result.update(endpoint.run_calls(options, wires[0]) if calls else endpoint.run_streams(options, wires))
    except TimeoutError as error:
        result["reason"] = str(error)
    result["rss"] = endpoint.peak_rss()
    endpoint.say(result)
    return 0 if result["ok"] else 1


def main() -> int:
    options = endpoint.parse_arguments(__doc__)
    RNS.Reticulum(options.config, logdest=lambda text: print(text, file=sys.stderr, flush=True))
    return serve(options) if options.role == "server" else measure(options)


if __name__ == "__main__":
    status = main()
    late = threading.Timer(LEAVE_WITHIN, os._exit, args=(status,))
    late.daemon = True
    late.start()
    RNS.exit(status)
