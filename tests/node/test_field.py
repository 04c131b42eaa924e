"""Cases from the field between nodes of ours: the first packets of a link, and writers faster than the link."""

from __future__ import annotations

import asyncio
import queue
import random
import string
import threading
from collections.abc import Callable
from typing import Any

import pytest

from rnsfast import Identity, Link, LinkClosed, aio
from tests.loopback import PATIENCE, Note, Worker, joined, number, number_of

LINKS = 200
FIRST = 20


# ------------------------------------------------------------------ the first packets of a new link


def packets(link: Link) -> None:
    for i in range(FIRST):
        link.send(i.to_bytes(4, "big") + bytes(36))


def messages(link: Link) -> None:
    link.channel.register(Note)
    for i in range(FIRST):
        link.channel.send(Note(i.to_bytes(4, "big") + bytes(36)), timeout=PATIENCE)


def listen(link: Link, kind: str, got: queue.SimpleQueue[int]) -> None:
    if kind == "packets":
        link.on_packet(lambda data: got.put(int.from_bytes(data[:4], "big")))
    else:
        link.channel.register(Note)
        link.channel.on_message(lambda message: got.put(int.from_bytes(message.raw[:4], "big")))


SENDERS: dict[str, Callable[[Link], None]] = {"packets": packets, "messages": messages}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SENDERS)
@pytest.mark.parametrize("speaker", ["initiator", "responder"])
def test_first_packets_of_two_hundred_links_all_arrive_once_and_in_order(kind: str, speaker: str) -> None:
    """The listener sets its handler late: a responder's established handler blocks until everything has been sent."""
    with joined() as pair:
        results: list[queue.SimpleQueue[int]] = []
        for _ in range(LINKS):
            got: queue.SimpleQueue[int] = queue.SimpleQueue()
            results.append(got)
            if speaker == "initiator":
                sent = threading.Event()

                def late(link: Link, sent: threading.Event = sent, got: queue.SimpleQueue[int] = got) -> None:
                    if kind == "packets":
                        assert sent.wait(PATIENCE)  # everything has been sent before anybody listens
                    listen(link, kind, got)

                inbox = pair.b.register(Identity(), "field", "case")
                inbox.on_link(late)
                link = pair.a.connect(inbox.hash, "field", "case", timeout=PATIENCE)
                SENDERS[kind](link)
                sent.set()
            else:
                inbox = pair.b.register(Identity(), "field", "case")
                inbox.on_link(SENDERS[kind])
                link = pair.a.connect(inbox.hash, "field", "case", timeout=PATIENCE)
                listen(link, kind, got)
        for got in results:
            assert [got.get(timeout=PATIENCE) for _ in range(FIRST)] == list(range(FIRST))
            assert got.empty()


@pytest.mark.slow
def test_first_packets_in_asyncio() -> None:
    with joined() as pair:

        async def test() -> None:
            a, b = aio.Node.wrap(pair.a), aio.Node.wrap(pair.b)
            for _ in range(50):
                got: asyncio.Queue[bytes] = asyncio.Queue()
                sent = asyncio.Event()

                async def on_link(link: aio.Link, sent: Any = sent, got: Any = got) -> None:
                    await sent.wait()
                    link.on_packet(got.put)

                inbox = b.register(Identity(), "field", "case")
                inbox.on_link(on_link)
                link = await a.connect(inbox.hash, "field", "case", timeout=PATIENCE)
                for i in range(FIRST):
                    link.send(b"%d" % i)
                sent.set()
                async with asyncio.timeout(PATIENCE):
                    assert [await got.get() for _ in range(FIRST)] == [b"%d" % i for i in range(FIRST)]

        asyncio.run(test())


# ------------------------------------------------------------------ a writer that is faster than the link

DELAY = 0.1  # seconds each way; the case has 0.25, which only takes longer
LINES = 1000  # the case has 4000


def make_lines(seed: int, count: int = LINES) -> list[bytes]:
    chance = random.Random(seed)
    return [f"{i:04} {''.join(chance.choices(string.printable[:94], k=60))}\n".encode() for i in range(count)]


def far_pair() -> Any:
    return joined(delay=DELAY)


def write_and_leave(link: Link, seed: int) -> None:
    link.channel.register(Note)
    with link.open_writer(1, compression="never") as writer:
        for line in make_lines(seed):
            writer.write(line)
    link.channel.send(number(17))
    link.channel.flush(PATIENCE)
    link.close()


class Reading:
    """The other end: reads lines, then the status, then the end. After a hundred lines it waits for `pause`."""

    def __init__(self, link: Link, pause: threading.Event | None = None) -> None:
        self.link, self.pause = link, pause
        link.channel.register(Note)
        self.reader = link.open_reader(1)
        self.worker = Worker(self._run)

    def _run(self) -> tuple[list[bytes], int, str]:
        lines: list[bytes] = []
        rest = b""
        while piece := self.reader.read(65 * 4):
            *whole, rest = (rest + piece).split(b"\n")
            lines += [line + b"\n" for line in whole]
            if self.pause is not None and len(lines) >= 100:
                assert self.pause.wait(PATIENCE)
        status = number_of(self.link.channel.receive(PATIENCE))
        try:
            self.link.channel.receive(PATIENCE)
        except LinkClosed as error:
            return lines, status, error.reason
        raise AssertionError("there is something after the status")


@pytest.mark.slow
def test_everything_arrives_then_the_status_then_the_end() -> None:
    with far_pair() as pair:
        link, peer = pair.link()
        reading = Reading(peer)
        write_and_leave(link, 1)
        assert reading.worker.result() == (make_lines(1), 17, "the peer closed it")


@pytest.mark.slow
def test_reader_that_stops_in_the_middle_loses_nothing() -> None:
    with far_pair() as pair:
        link, peer = pair.link()
        pause = threading.Event()
        reading = Reading(peer, pause)
        write_and_leave(link, 2)  # all of it is proved while the reader stands still
        pause.set()
        assert reading.worker.result() == (make_lines(2), 17, "the peer closed it")


@pytest.mark.slow
def test_stop_message_ends_an_endless_writer_within_its_buffer() -> None:
    with far_pair() as pair:
        link, peer = pair.link()
        buffer = 64 * 1024
        writer = link.open_writer(1, compression="never", buffer=buffer)
        link.channel.register(Note)
        reader = peer.open_reader(1)
        stop = threading.Event()
        link.channel.on_message(lambda message: stop.set())

        def write() -> None:
            line = make_lines(3, 1)[0]
            while not stop.is_set():
                writer.write(line)
            writer.abort()

        writing = Worker(write)
        received = 0
        while received < 200_000:
            received += len(reader.read(65536))
        peer.channel.send(Note(b"s"))
        writing.result()
        link.channel.flush(PATIENCE)  # what was in the window is proved, so it has arrived
        after = reader.available
        assert received + after == writer.sent
        assert writer.written - writer.sent <= buffer  # given up
        window = 48 * link.channel._engine.stream_mdu
        assert after <= buffer + window  # what was on its way when the message came, and what followed it


@pytest.mark.slow
def test_a_slow_link_does_not_slow_the_others() -> None:
    with far_pair() as slow, joined() as fast:
        far, far_peer = slow.link()
        reading_far = Reading(far_peer)
        writing_far = Worker(write_and_leave, far, 4)
        for seed in (5, 6):
            link, peer = fast.link()
            reading = Reading(peer)
            write_and_leave(link, seed)
            assert reading.worker.result() == (make_lines(seed), 17, "the peer closed it")
        assert writing_far.is_running  # both were done long before
        writing_far.result()
        assert reading_far.worker.result() == (make_lines(4), 17, "the peer closed it")


@pytest.mark.slow
def test_three_far_links_of_one_process_at_the_same_time() -> None:
    with far_pair() as pair:
        ends = [pair.link() for _ in range(3)]
        readings = [Reading(peer) for _, peer in ends]
        writers = [Worker(write_and_leave, link, 10 + i) for i, (link, _) in enumerate(ends)]
        for i, (writer, reading) in enumerate(zip(writers, readings, strict=True)):
            writer.result()
            assert reading.worker.result() == (make_lines(10 + i), 17, "the peer closed it")


@pytest.mark.slow
def test_far_link_in_asyncio() -> None:
    with far_pair() as pair:
        link, peer = pair.link()
        for end in (link, peer):
            end.channel.register(Note)

        async def test() -> None:
            near, far = aio.Link(aio.Node.wrap(pair.a), link), aio.Link(aio.Node.wrap(pair.b), peer)

            async def write() -> None:
                async with near.open_writer(1, compression="never") as writer:
                    for line in make_lines(7):
                        await writer.write(line)
                await near.channel.send(number(17))
                await near.channel.flush()
                near.close()

            writing = asyncio.ensure_future(write())
            assert [line async for line in far.open_reader(1)] == make_lines(7)
            assert [number_of(message) async for message in far.channel] == [17]
            await writing

        asyncio.run(test())
