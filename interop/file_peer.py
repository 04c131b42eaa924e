"""Sends and receives one file with a stock node, after `docs/file-protocol.md`. Public API of `rns` only.

    file_peer.py receive --config DIR --dir OUT [--once] [--print-hash] [--allow HASH]... [--max-size N]
                         [--identity FILE]
    file_peer.py send --config DIR FILE HASH [--name NAME] [--identity FILE] [--timeout S] [--progress]

For each transfer one JSON line on standard output; what people may want to read goes to standard error. `FILE` may be
`-`. Exit status: 0 transferred, 1 refused or failed, 2 wrong arguments or configuration.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import RNS
from RNS.Buffer import StreamDataMessage
from RNS.vendor import umsgpack

APP, ASPECT = "rnsfast", "files"
VERSION = 1
NAME_BYTES, SUFFIX_BYTES, REASON_BYTES, SAVED_BYTES = 200, 16, 120, 210
STREAM = 1
CHUNK = 16384  # bytes offered to the channel at a time
POLL = 0.0005  # seconds between looks at readiness: the stock channel has nothing to wait on
OFFER_WITHIN, ANSWER_WITHIN, RESULT_WITHIN, IDENTITY_WITHIN, CLOSE_WITHIN = 30.0, 60.0, 60.0, 2.0, 10.0


class TransferError(Exception):
    """One sentence that says why a transfer did not succeed."""


# ----------------------------------------------------------------------------------------------------------- messages
class Mapped(RNS.MessageBase):
    """A message whose payload is one msgpack map."""

    MSGTYPE = 0x5200

    def __init__(self, fields: dict[str, Any] | None = None) -> None:
        self.fields = fields or {}

    def pack(self) -> bytes:
        return umsgpack.packb(self.fields)

    def unpack(self, raw: bytes) -> None:
        try:
            fields = umsgpack.unpackb(raw)
        except Exception:
            fields = None
        self.fields = fields if isinstance(fields, dict) else {}  # raising here would stall the channel for good

    def want(self, key: str, *kinds: type) -> Any:
        value = self.fields.get(key)
        if type(value) not in kinds or key not in self.fields:
            raise TransferError(f"the other side sent {type(self).__name__.upper()} without a proper {key}")
        return value


class Offer(Mapped):
    MSGTYPE = 0x5201


class Accept(Mapped):
    MSGTYPE = 0x5202


class Refuse(Mapped):
    MSGTYPE = 0x5203


class Digest(Mapped):
    MSGTYPE = 0x5204


class Result(Mapped):
    MSGTYPE = 0x5205


NONE = type(None)


def shorten(text: str, limit: int) -> str:
    """`text` in at most `limit` bytes of UTF-8."""
    return text.encode("utf-8", "replace")[:limit].decode("utf-8", "ignore")


def name_fault(name: str) -> str | None:
    """What is wrong with a file name from the network, if anything."""
    if not 1 <= len(name.encode("utf-8", "replace")) <= NAME_BYTES:
        return f"the name must have 1 to {NAME_BYTES} bytes"
    if name in (".", "..") or name != name.strip():
        return "the name is not a file name"
    if any(c in "/\\" or ord(c) < 0x20 or ord(c) == 0x7F for c in name):
        return "the name has characters that are not allowed"
    return None


def proper_name(text: str) -> str:
    """A name that may be offered, made from any text."""
    name = "".join("_" if c in "/\\" or ord(c) < 0x20 or ord(c) == 0x7F else c for c in text).strip() or "file"
    name = name.encode("utf-8", "replace").decode()
    if name in (".", ".."):
        return "file"
    if len(name.encode()) > NAME_BYTES:
        suffix = Path(name).suffix
        if len(suffix.encode()) > SUFFIX_BYTES:
            suffix = ""
        name = shorten(name.removesuffix(suffix), NAME_BYTES - len(suffix.encode())).strip() + suffix
    return name


# -------------------------------------------------------------------------------------------------------- one channel
class Conversation:
    """The channel of one link. Messages wait in a queue for the thread that leads the transfer."""

    def __init__(self, link: Any) -> None:
        self.link = link
        self.ended = threading.Event()
        self.messages: queue.Queue[Mapped | None] = queue.Queue()  # None: the link has ended
        self.bell = threading.Event()
        self.channel = link.get_channel()
        for kind in (Offer, Accept, Refuse, Digest, Result):
            self.channel.register_message_type(kind)
        self.channel.add_message_handler(self._on_message)
        link.set_link_closed_callback(self._on_closed)
        if link.status == RNS.Link.CLOSED:
            self._on_closed(link)

    def _on_message(self, message: Any) -> bool:
        if not isinstance(message, Mapped):
            return False
        self.messages.put(message)
        self.bell.set()
        return True

    def _on_closed(self, _link: Any) -> None:
        self.ended.set()
        self.messages.put(None)
        self.bell.set()

    def next(self, limit: float | None, what: str) -> Mapped:
        try:
            message = self.messages.get(timeout=limit)
        except queue.Empty:
            raise TransferError(f"no {what} within {limit:.0f} s") from None
        if message is None:
            self.messages.put(None)
            raise TransferError(f"the link ended before {what}")
        return message

    def send(self, message: Any) -> None:
        while True:
            self.wait_ready()
            try:
                self.channel.send(message)
                return
            except RNS.Channel.ChannelException as error:
                if error.type != RNS.Channel.CEType.ME_LINK_NOT_READY:
                    raise
                time.sleep(POLL)

    def wait_ready(self) -> None:
        while not self.ended.is_set():
            if self.link.status == RNS.Link.ACTIVE and self.channel.is_ready_to_send():
                return
            time.sleep(POLL)
        raise TransferError("the link ended in the middle of the transfer")


# ------------------------------------------------------------------------------------------------------------ receive
class Reception:
    """One incoming link, on a thread of its own."""

    def __init__(self, link: Any, options: argparse.Namespace) -> None:
        self.options = options
        self.talk = Conversation(link)
        self.identified = threading.Event()
        link.set_remote_identified_callback(lambda _link, _identity: self.identified.set())
        self.size, self.digest = 0, hashlib.sha256()
        self.name: str | None = None
        self.part: Path | None = None
        self.reader: Any = None
        self.accepted = False
        self.begun = time.monotonic()

    def run(self) -> dict[str, Any]:
        """Carry the transfer through and return the line to print."""
        saved: str | None = None
        reason: str | None = None
        try:
            saved = self._receive()
        except (TransferError, OSError) as error:
            reason = shorten(str(error) or type(error).__name__, REASON_BYTES)
            self._tell_failure(reason)
        finally:
            if self.part is not None:
                self.part.unlink(missing_ok=True)
        self._see_off()
        peer = self.talk.link.get_remote_identity()
        return {
            "ok": reason is None,
            "role": "receive",
            "name": self.name,
            "saved_as": saved,
            "size": self.size,
            "sha256": self.digest.hexdigest(),
            "reason": reason,
            "seconds": round(time.monotonic() - self.begun, 4),
            "peer": peer.hash.hex() if peer else None,
        }

    def _receive(self) -> str:
        offer = self.talk.next(OFFER_WITHIN, "offer")
        stream, size = self._check(offer)
        self.begun = time.monotonic()
        self.part = self.options.dir / f".{hashlib.sha256(os.urandom(16)).hexdigest()[:16]}.part"
        with self.part.open("xb") as file:
            self.reader = RNS.Buffer.create_reader(stream, self.talk.channel, lambda ready: self.talk.bell.set())
            self.talk.send(Accept())
            self.accepted = True
            if self.options.events:
                say(json.dumps({"event": "accepted", "name": self.name, "size": size}))
            told = self._content(file, size)
            file.flush()
            os.fsync(file.fileno())
        if told.want("size", int) != self.size or (size is not None and size != self.size):
            raise TransferError(f"{self.size} bytes arrived, {told.fields['size']} were sent, {size} were offered")
        if told.want("sha256", bytes) != self.digest.digest():
            raise TransferError("the content is not what was sent: digests differ")
        saved = self._keep(self.part)
        with contextlib.suppress(TransferError):  # a sender that has gone does not make the file any less whole
            self.talk.send(Result(self._result(True, None, saved)))
        return saved

    def _check(self, offer: Mapped) -> tuple[int, int | None]:
        if not isinstance(offer, Offer):
            raise TransferError("the first message was no offer")
        if (version := offer.want("v", int)) != VERSION:
            raise TransferError(f"version {version} is not known here")
        self.name = offer.want("name", str)
        if fault := name_fault(self.name):
            raise TransferError(fault)
        stream, size = offer.want("stream", int), offer.want("size", int, NONE)
        if not 0 <= stream <= 0x3FFF or (size is not None and size < 0):
            raise TransferError("the offer has a number that cannot be")
        if size is not None and self.options.max_size is not None and size > self.options.max_size:
            raise TransferError(f"{size} bytes are more than the {self.options.max_size} taken here")
        if self.options.allow:
            self.identified.wait(IDENTITY_WITHIN)
            who = self.talk.link.get_remote_identity()
            if who is None or who.hash.hex() not in self.options.allow:
                raise TransferError("the sender is not on the list of those allowed")
        return stream, size

    def _content(self, file: BinaryIO, size: int | None) -> Digest:
        """Take the stream to its end and return the digest message that came after it."""
        limit, told, ended = self.options.max_size if size is None else size, None, False
        while not ended or told is None:
            self.talk.bell.wait()
            self.talk.bell.clear()
            over = self.talk.ended.is_set()  # before reading: what came until now is read below
            while (got := self.reader.read(65536)) is not None and not ended:
                ended = got == b""
                if got and not self.size and self.options.events:
                    say(json.dumps({"event": "begun", "size": len(got)}))
                self.size += len(got)
                self.digest.update(got)
                file.write(got)
                if limit is not None and self.size > limit:
                    raise TransferError(f"more than {limit} bytes came")
            told = told or self._digest_message()
            if over and not (ended and told):
                raise TransferError("the link ended before the whole file was here")
        return told

    def _digest_message(self) -> Digest | None:
        while True:
            try:
                message = self.talk.messages.get_nowait()
            except queue.Empty:
                return None
            if message is None:
                self.talk.messages.put(None)
                return None
            if isinstance(message, Digest):
                return message
            if isinstance(message, Offer):
                self.talk.send(Refuse({"reason": "one file a link"}))

    def _keep(self, part: Path) -> str:
        """Give the file its name, or the next free one like it."""
        wish, number = Path(self.name or "file"), 0
        while True:
            ending = f" ({number}){wish.suffix}" if number else wish.suffix
            stem = wish.name.removesuffix(wish.suffix)
            name = shorten(stem, SAVED_BYTES - len(ending.encode())) + ending
            try:
                os.link(part, self.options.dir / name)  # unlike a rename it never replaces anything
                return name
            except FileExistsError:
                number += 1

    def _result(self, ok: bool, reason: str | None, saved: str | None) -> dict[str, Any]:
        return {"ok": ok, "size": self.size, "sha256": self.digest.digest(), "reason": reason, "saved_as": saved}

    def _see_off(self) -> None:
        """Read and throw away until the sender closes, and close if it does not."""
        end = time.monotonic() + CLOSE_WITHIN
        while not self.talk.ended.is_set() and (left := end - time.monotonic()) > 0:
            self.talk.bell.wait(left)
            self.talk.bell.clear()
            while self.reader is not None and self.reader.read(65536):
                pass
        if not self.talk.ended.is_set():
            self.talk.link.teardown()

    def _tell_failure(self, reason: str) -> None:
        if self.talk.ended.is_set():
            return
        with contextlib.suppress(TransferError):  # it has gone: the line on standard output says the rest
            failed = Result(self._result(False, reason, None))
            self.talk.send(failed if self.accepted else Refuse({"reason": reason}))


def receive(options: argparse.Namespace) -> int:
    options.dir.mkdir(parents=True, exist_ok=True)
    start_node(options.config)
    identity = load_identity(options.identity or options.config / "file_peer.identity")
    destination = RNS.Destination(identity, RNS.Destination.IN, RNS.Destination.SINGLE, APP, ASPECT)
    results: queue.Queue[dict[str, Any]] = queue.Queue()

    def established(link: Any) -> None:  # on the stock node's inbound thread: set up here, work elsewhere
        reception = Reception(link, options)
        threading.Thread(target=lambda: results.put(reception.run()), daemon=True).start()

    destination.set_link_established_callback(established)
    destination.announce()
    if options.print_hash:
        say(destination.hash.hex())
    while True:
        result = results.get()
        say(json.dumps(result))
        if options.once:
            return 0 if result["ok"] else 1


# --------------------------------------------------------------------------------------------------------------- send
def chunks(file: BinaryIO) -> Iterator[bytes]:
    read = getattr(file, "read1", file.read)  # standard input: what is there now, not a full chunk
    while content := read(CHUNK):
        yield content


class Sending:
    """One outgoing file."""

    def __init__(self, options: argparse.Namespace, file: BinaryIO, name: str, size: int | None) -> None:
        self.options, self.file, self.name, self.size = options, file, name, size
        self.sent, self.digest = 0, hashlib.sha256()
        self.saved: str | None = None
        self.writer: Any = None  # kept: a writer that is collected sends end marks of its own

    def run(self) -> None:
        """Raises TransferError or OSError if the receiver does not end up with the whole file."""
        talk = Conversation(self._connect())
        try:
            if self.options.identity is not None:
                talk.link.identify(load_identity(self.options.identity))
            talk.send(Offer({"v": VERSION, "name": self.name, "size": self.size, "stream": STREAM}))
            answer = talk.next(ANSWER_WITHIN, "answer to the offer")
            if isinstance(answer, Refuse):
                raise TransferError(f"refused: {answer.want('reason', str)}")
            if not isinstance(answer, Accept):
                raise TransferError("the answer to the offer was neither yes nor no")
            early = self._content(talk)
            if early is None:
                talk.send(Digest({"size": self.sent, "sha256": self.digest.digest()}))
            self._judge(early or talk.next(RESULT_WITHIN, "result"))
        finally:
            talk.link.teardown()

    def _connect(self) -> Any:
        target, end = bytes.fromhex(self.options.hash), time.monotonic() + self.options.timeout
        if not RNS.Transport.has_path(target) and not RNS.Transport.await_path(target, timeout=self.options.timeout):
            raise TransferError(f"no path to {self.options.hash} within {self.options.timeout:.0f} s")
        identity = RNS.Identity.recall(target)
        destination = RNS.Destination(identity, RNS.Destination.OUT, RNS.Destination.SINGLE, APP, ASPECT)
        if destination.hash != target:
            raise TransferError(f"{self.options.hash} is not a {APP}.{ASPECT} destination")
        done = threading.Event()
        link = RNS.Link(destination, lambda link: done.set(), lambda link: done.set())
        if not done.wait(max(1.0, end - time.monotonic())) or link.status != RNS.Link.ACTIVE:
            link.teardown()
            raise TransferError("no link to the receiver")
        return link

    def _content(self, talk: Conversation) -> Mapped | None:
        """Write everything and the end mark. Returns a message if the receiver gave up in between."""
        RNS.RawChannelWriter.COMPRESSION_TRIES = 1  # no attempts at all; a writer looks only at its class
        self.writer = RNS.RawChannelWriter(STREAM, talk.channel)
        for content in chunks(self.file):
            view, at = memoryview(content), 0
            while at < len(content):
                talk.wait_ready()
                if not talk.messages.empty():
                    return talk.next(0, "result")
                at += self.writer.write(bytes(view[at:]))
            self.sent += len(content)
            self.digest.update(content)
            self._show()
        if self.size is not None and self.sent != self.size:
            raise TransferError(f"the file changed while it was sent: {self.size} bytes before, {self.sent} now")
        talk.send(StreamDataMessage(STREAM, b"", eof=True))
        return None

    def _judge(self, result: Mapped) -> None:
        if not isinstance(result, Result):
            raise TransferError("the receiver answered with something that is no result")
        if not result.want("ok", bool):
            raise TransferError(f"the receiver failed: {result.want('reason', str, NONE)}")
        if result.want("sha256", bytes, NONE) != self.digest.digest() or result.want("size", int) != self.sent:
            raise TransferError("the receiver kept something else than what was sent")
        self.saved = result.want("saved_as", str, NONE)

    def _show(self) -> None:
        if self.options.progress:
            total = "?" if self.size is None else str(self.size)
            print(f"\r{self.sent}/{total} bytes", end="", file=sys.stderr, flush=True)


def send(options: argparse.Namespace) -> int:
    standard = options.file == "-"
    try:
        file = sys.stdin.buffer if standard else open(options.file, "rb")  # noqa: SIM115
        size = None if standard else os.fstat(file.fileno()).st_size
        if len(bytes.fromhex(options.hash)) != 16:
            raise ValueError(f"{options.hash} is not a destination hash: 32 hex digits are")
        start_node(options.config)
    except (OSError, ValueError) as error:
        print(f"file_peer: {error}", file=sys.stderr)
        return 2
    name = proper_name(options.name or ("stdin" if standard else Path(options.file).name))
    begun, reason = time.monotonic(), None
    sending = Sending(options, file, name, size)
    try:
        sending.run()
    except (TransferError, OSError) as error:
        reason = str(error)
    line = {
        "ok": reason is None,
        "role": "send",
        "name": name,
        "saved_as": sending.saved,
        "size": sending.sent,
        "sha256": sending.digest.hexdigest(),
        "reason": reason,
        "seconds": round(time.monotonic() - begun, 4),
        "peer": options.hash,
    }
    say(json.dumps(line))
    return 0 if reason is None else 1


# ------------------------------------------------------------------------------------------------------------- common
def say(text: str) -> None:
    print(text, flush=True)


def start_node(config: Path) -> Any:
    return RNS.Reticulum(str(config), logdest=lambda text: print(text, file=sys.stderr, flush=True))


def load_identity(path: Path) -> Any:
    """The identity in that file; a new one is made where there is no file."""
    if path.exists():
        identity = RNS.Identity.from_file(str(path))
        if identity is None:
            raise ValueError(f"{path} holds no identity")
        return identity
    identity = RNS.Identity()
    identity.to_file(str(path))
    return identity


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    roles = parser.add_subparsers(dest="role", required=True)
    one = roles.add_parser("receive")
    one.add_argument("--dir", type=Path, required=True, help="directory for what is received")
    one.add_argument("--once", action="store_true", help="leave after one transfer")
    one.add_argument("--print-hash", action="store_true", help="print the destination hash when it can be reached")
    one.add_argument("--allow", action="append", default=[], metavar="HASH", help="identity hash that may send")
    one.add_argument("--max-size", type=int, help="bytes")
    one.add_argument(
        "--events", action="store_true", help="print JSON lines when a transfer is accepted and when bytes come"
    )
    two = roles.add_parser("send")
    two.add_argument("file", help="path, or - for standard input")
    two.add_argument("hash", help="destination hash of the receiver")
    two.add_argument("--name", help="name to offer, instead of the file's own")
    two.add_argument("--timeout", type=float, default=20.0, help="seconds for path and link together")
    two.add_argument("--progress", action="store_true")
    for role in (one, two):
        role.add_argument("--config", type=Path, required=True, help="configuration directory of the node")
        role.add_argument("--identity", type=Path, help="identity file, made if it does not exist")
    options = parser.parse_args()
    return receive(options) if options.role == "receive" else send(options)


if __name__ == "__main__":
    status = main()
    late = threading.Timer(4.0, os._exit, args=(status,))
    late.daemon = True
    late.start()
    RNS.exit(status)
