"""A two-way stream: the server returns what it reads in capital letters, and ends when the client has ended.

    buffer_peer.py server --config DIR               prints its destination hash, serves until Ctrl-C
    buffer_peer.py client --config DIR HASH          standard input goes to the server, what comes back is printed

Stream 0 in both directions. The client sends its end mark after its input and waits for the server's.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from typing import Any

import RNS
from common import connect, leave, listen, start
from RNS.Buffer import StreamDataMessage

STREAM = 0


class Ends:
    """Both halves of one stream, used kindly: look for room before writing, read only when something came."""

    def __init__(self, link: Any) -> None:
        self.link, self.channel, self.bell = link, link.get_channel(), threading.Event()
        link.set_link_closed_callback(lambda link: self.bell.set())
        self.reader = RNS.Buffer.create_reader(STREAM, self.channel, lambda ready: self.bell.set())
        self.writer = RNS.RawChannelWriter(STREAM, self.channel)

    def wait_room(self) -> None:
        while not (self.link.status == RNS.Link.ACTIVE and self.channel.is_ready_to_send()):
            if self.link.status == RNS.Link.CLOSED:
                raise ConnectionError("the link is closed")
            time.sleep(0.001)

    def write(self, content: bytes) -> None:
        while content:
            self.wait_room()
            content = content[self.writer.write(content) :]

    def end(self) -> None:
        self.wait_room()
        self.channel.send(StreamDataMessage(STREAM, b"", eof=True))

    def read(self) -> bytes:
        """What has come; waits for something. Empty at the end of the stream."""
        while (content := self.reader.read(65536)) is None:
            if self.link.status == RNS.Link.CLOSED:
                raise ConnectionError("the link ended before the stream")
            self.bell.wait()
            self.bell.clear()
        return content


def serve(options: argparse.Namespace) -> int:
    start(options.config)
    kept: list[Ends] = []  # a writer that is collected sends end marks of its own

    def joined(link: RNS.Link) -> None:
        ends = Ends(link)
        kept.append(ends)

        def work() -> None:
            try:
                while content := ends.read():
                    ends.write(content.upper())
                ends.end()
            except ConnectionError as error:
                print(error, file=sys.stderr, flush=True)

        threading.Thread(target=work, daemon=True).start()

    return listen("buffer", joined)


def ask(options: argparse.Namespace) -> int:
    start(options.config)
    link = connect(options.hash, "buffer")
    ends = Ends(link)

    def feed() -> None:
        while content := sys.stdin.buffer.read1(16384):
            ends.write(content)
        ends.end()

    threading.Thread(target=feed, daemon=True).start()
    try:
        while content := ends.read():
            sys.stdout.buffer.write(content)
            sys.stdout.buffer.flush()
    except ConnectionError as error:
        print(error, file=sys.stderr)
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
    chosen = parser.parse_args()
    leave(serve(chosen) if chosen.role == "server" else ask(chosen))
