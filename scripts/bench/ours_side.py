"""rnsfast endpoint of the stream and call benchmarks, either role. Protocol and output are those of `rns_side.py`.

ours_side.py server --config DIR
ours_side.py client --config DIR --dest HASH --workload stream|ten|rpc [--bytes N] [--links N] [--calls N] ...
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import endpoint

from rnsfast import Identity, Link, Node, RnsfastError


class Raw:
    def __init__(self, content: bytes = b"") -> None:
        self.content = content

    def pack(self) -> bytes:
        return self.content

    def unpack(self, raw: bytes) -> None:
        self.content = raw


class Hello(Raw):
    MSGTYPE = endpoint.HELLO


class Done(Raw):
    MSGTYPE = endpoint.DONE


class Part(Raw):
    MSGTYPE = endpoint.PART


class Wire:
    """The channel of one link."""

    kinds = SimpleNamespace(hello=Hello, done=Done, part=Part)

    def __init__(self, link: Link) -> None:
        self.link, self.channel = link, link.channel
        self.channel.register(Hello, Done, Part)
        self.room = self.channel.mdu

    def send(self, messages: Sequence[Any], limit: float) -> None:
        self.channel.send_many(messages, limit)

    def take(self, limit: float) -> Raw:
        message: Raw = self.channel.receive(limit)
        return message

    def push(self, content: bytes) -> None:
        with self.link.open_writer(endpoint.STREAM, compression="never") as writer:
            writer.write(content)


def serve(node: Node, options: argparse.Namespace) -> int:
    def arrived(link: Link) -> None:
        reader = link.open_reader(endpoint.STREAM)

        def read(total: int, limit: float) -> tuple[int, str]:
            got, digest = 0, hashlib.sha256()
            reader.timeout = limit
            while got < total and (content := reader.read(1 << 20)):
                got += len(content)
                digest.update(content)
            return got, digest.hexdigest()

        endpoint.Served(Wire(link), read, options.limit)

    inbox = node.register(Identity(), endpoint.APP, endpoint.ASPECT)
    inbox.on_link(arrived)
    inbox.announce()
    endpoint.say({"event": "ready", "dest": inbox.hash.hex()})
    return endpoint.serve_until_quit()


def measure(node: Node, options: argparse.Namespace) -> int:
    result: dict[str, Any] = {"ok": False, "workload": options.workload, "links": options.links, "writer": "rnsfast"}
    target = bytes.fromhex(options.dest)
    links: list[Link] = []
    try:
        links += [node.connect(target, endpoint.APP, endpoint.ASPECT, timeout=20) for _ in range(options.links)]
        wires = [Wire(link) for link in links]
        payload = min(16384, wires[0].room - 2)
        result.update(mtu=links[0].mtu, mdu=links[0].mdu, payload=payload, timeouts=None)
        calls = options.workload == "rpc"
        result.update(endpoint.run_calls(options, wires[0]) if calls else endpoint.run_streams(options, wires))
    except (TimeoutError, RnsfastError) as error:
        result["reason"] = str(error)
    result["rss"] = endpoint.peak_rss()
    endpoint.say(result)
    for link in links:
        link.close()
    return 0 if result["ok"] else 1


def main() -> int:
    options = endpoint.parse_arguments(__doc__)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    with Node(options.config) as node:
        return serve(node, options) if options.role == "server" else measure(node, options)


if __name__ == "__main__":
    sys.exit(main())
