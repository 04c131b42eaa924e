"""A sender's and a receiver's node joined in memory, and ends that say what no proper one would."""

from __future__ import annotations

import queue
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rnsfast import Identity, Link
from rnsfast.files import APP, ASPECT, Outcome, Progress, Receiver, Report, Sender
from rnsfast.files.messages import FileMessage
from rnsfast.files.talk import Conversation
from tests.loopback import PATIENCE, Pair


def random_bytes(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


class Memory:
    """A source that hands out what it is given, piece by piece. A piece may be a function: it is called instead."""

    def __init__(self, *pieces: Any, size: int | None, name: str = "a.bin") -> None:
        self.name, self.size, self.offered_name = name, size, name
        self._pieces = list(pieces)
        self.interrupted = False

    def read(self, most: int) -> bytes:
        while self._pieces and not self.interrupted:
            piece = self._pieces.pop(0)
            if not callable(piece):
                return bytes(piece)
            piece()
        return b""

    def interrupt(self) -> None:
        self.interrupted = True

    def close(self) -> None:
        pass


def whole(data: bytes, name: str = "a.bin") -> Memory:
    return Memory(data, size=len(data), name=name)


class Bench:
    """`pair.a` sends, `pair.b` receives into `inbox`."""

    def __init__(self, inbox: Path, pair: Pair, **options: Any) -> None:
        self.inbox, self.pair = inbox, pair
        self.reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self.progress: list[Progress] = []
        self.receiver = Receiver(pair.b, Identity(), inbox, on_report=self.reports.put, **options)

    def sender(self, source: Any, **options: Any) -> Sender:
        return Sender(self.pair.a, self.receiver.hash, source, on_progress=self.progress.append, **options)

    def send(self, source: Any, **options: Any) -> Outcome:
        return self.sender(source, **options).run(PATIENCE)

    def report(self) -> Report:
        return self.reports.get(timeout=PATIENCE)

    def files(self) -> list[str]:
        return sorted(path.name for path in self.inbox.iterdir())

    @contextmanager
    def talk(self) -> Iterator[Conversation]:
        """A link to the receiver for a sender without manners."""
        with self.pair.a.connect(self.receiver.hash, APP, ASPECT, timeout=PATIENCE) as link:
            yield Conversation(link)


@contextmanager
def bench(inbox: Path, **options: Any) -> Iterator[Bench]:
    inbox.mkdir(exist_ok=True)
    pair = Pair().start()
    try:
        yield Bench(inbox, pair, **options)
    finally:
        pair.stop()


class OddReceiver:
    """A destination whose links are answered by the test: `answer(conversation)` runs on a callback thread."""

    def __init__(self, pair: Pair, answer: Any) -> None:
        self.links: list[Link] = []
        self.inbox = pair.b.register(Identity(), APP, ASPECT)
        self.hash = self.inbox.hash

        def on_link(link: Link) -> None:
            self.links.append(link)
            talk: list[Conversation] = []

            def first(message: FileMessage) -> bool:
                answer(talk[0], message)
                return True

            talk.append(Conversation(link, first))

        self.inbox.on_link(on_link)
