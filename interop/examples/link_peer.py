"""A link in its plainest form: the server answers every packet with its text reversed, and says who spoke if it knows.

    link_peer.py server --config DIR                     prints its destination hash, serves until Ctrl-C
    link_peer.py client --config DIR HASH [WORD]...      sends each word as one packet, prints each answer, closes

With `--identify` (after the words) the client shows an identity made on the spot. Exit status 0 if every word was
answered. Written for the stock API.
"""

from __future__ import annotations

import argparse
import queue
import sys

import RNS
from common import connect, leave, listen, start


def serve(options: argparse.Namespace) -> int:
    start(options.config)

    def joined(link: RNS.Link) -> None:
        def answer(content: bytes, _packet: RNS.Packet) -> None:
            who = link.get_remote_identity()
            name = who.hash.hex() if who else "stranger"
            RNS.Packet(link, name.encode() + b" " + content[::-1]).send()

        link.set_packet_callback(answer)

    return listen("link", joined)


def ask(options: argparse.Namespace) -> int:
    start(options.config)
    answers: queue.Queue[bytes] = queue.Queue()
    link = connect(options.hash, "link")
    link.set_packet_callback(lambda content, packet: answers.put(content))
    if options.identify:
        link.identify(RNS.Identity())
    try:
        for word in options.words:
            RNS.Packet(link, word.encode()).send()
            print(answers.get(timeout=options.timeout).decode("utf-8", "replace"), flush=True)
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
    client.add_argument("words", nargs="*", default=["hello"])
    client.add_argument("--identify", action="store_true")
    client.add_argument("--timeout", type=float, default=15.0)
    chosen = parser.parse_args()
    leave(serve(chosen) if chosen.role == "server" else ask(chosen))
