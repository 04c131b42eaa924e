"""Typed messages over a channel: the server adds up numbers it is sent and reports the sum after each.

    channel_peer.py server --config DIR                  prints its destination hash, serves until Ctrl-C
    channel_peer.py client --config DIR HASH NUMBER...   sends the numbers one by one, prints the running sums, closes

Two message types, integers big endian: 0x0201 Term (8 bytes, signed) to the server; 0x0202 Sum (count, 4 bytes, and
sum, 8 bytes, signed) to the client.
"""

from __future__ import annotations

import argparse
import queue
import struct
import sys
import threading
import time
from typing import Any

import RNS
from common import connect, leave, listen, start


class Term(RNS.MessageBase):
    MSGTYPE = 0x0201

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def pack(self) -> bytes:
        return struct.pack(">q", self.value)

    def unpack(self, raw: bytes) -> None:
        (self.value,) = struct.unpack(">q", raw[:8])


class Sum(RNS.MessageBase):
    MSGTYPE = 0x0202

    def __init__(self, count: int = 0, total: int = 0) -> None:
        self.count, self.total = count, total

    def pack(self) -> bytes:
        return struct.pack(">Iq", self.count, self.total)

    def unpack(self, raw: bytes) -> None:
        self.count, self.total = struct.unpack(">Iq", raw[:12])


def send(link: Any, channel: Any, message: Any) -> bool:
    """Send as soon as there is room. The stock channel has no event for that, so it is asked."""
    while link.status == RNS.Link.ACTIVE:
        if channel.is_ready_to_send():
            channel.send(message)
            return True
        time.sleep(0.002)
    return False


def serve(options: argparse.Namespace) -> int:
    start(options.config)

    def joined(link: RNS.Link) -> None:
        channel, terms = link.get_channel(), queue.Queue[int]()
        channel.register_message_type(Term)
        channel.add_message_handler(lambda message: isinstance(message, Term) and (terms.put(message.value) or True))

        def reckon() -> None:  # not in the handler: a handler that sends can block the whole node
            count = total = 0
            while link.status != RNS.Link.CLOSED:
                try:
                    total += terms.get(timeout=1)
                except queue.Empty:
                    continue
                count += 1
                send(link, channel, Sum(count, total))

        threading.Thread(target=reckon, daemon=True).start()

    return listen("channel", joined)


def ask(options: argparse.Namespace) -> int:
    start(options.config)
    sums: queue.Queue[Sum] = queue.Queue()
    link = connect(options.hash, "channel")
    channel = link.get_channel()
    channel.register_message_type(Sum)
    channel.add_message_handler(lambda message: isinstance(message, Sum) and (sums.put(message) or True))
    try:
        for number in options.numbers:
            send(link, channel, Term(number))
            answer = sums.get(timeout=options.timeout)
            print(answer.count, answer.total, flush=True)
    except queue.Empty:
        print("no answer", file=sys.stderr)
        return 1
    finally:
        link.teardown()
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    roles = parser.add_subparsers(dest="role", required=True)
    server, client = roles.add_parser("server"), roles.add_parser("client")
    for role in (server, client):
        role.add_argument("--config", required=True)
    client.add_argument("hash")
    client.add_argument("numbers", nargs="+", type=int)
    client.add_argument("--timeout", type=float, default=15.0)
    chosen = parser.parse_args()
    leave(serve(chosen) if chosen.role == "server" else ask(chosen))
