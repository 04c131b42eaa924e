"""A writer of ours that is faster than the link, and a stock peer that reads slowly: field case F3.

4000 numbered lines through a quarter of a second each way, read one in two milliseconds, then a status message.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from time import monotonic

import pytest

from interop.harness import workspace
from interop.ours import LIMIT, ROLES, Duo, Joint, Numbered, Role, Task, duo, join
from interop.seeded import digest, random_bytes
from rnsfast import StreamWriter

LINE = 65
LINES = 4000
DELAY = 0.25  # seconds each way
BUFFER = 512 * 1024  # what a writer keeps, as documented
STATUS = 17


def lines(first: int = 0, count: int = LINES) -> bytes:
    printable = random_bytes("lines", 30 * count).hex().encode()
    rows = (b"%04d%s\n" % (first + n, printable[60 * n : 60 * n + 60]) for n in range(count))
    return b"".join(rows)


TEXT = lines()


@pytest.fixture
def pair() -> Iterator[Duo]:
    with workspace() as space, duo(space, proxied=True) as made:
        made.from_us.delay = made.from_stock.delay = DELAY
        yield made


def write_lines(joint: Joint, writer: StreamWriter, text: bytes) -> None:
    writer.timeout = LIMIT
    for at in range(0, len(text), LINE):
        writer.write(text[at : at + LINE])


def give(joint: Joint) -> None:
    """The lines, as fast as the API takes them, then the status, then the end."""
    writer = joint.link.open_writer(1)
    write_lines(joint, writer, TEXT)
    writer.flush()  # a message overtakes what is buffered: the status follows the last line
    joint.link.channel.send(Numbered(STATUS), timeout=LIMIT)
    writer.close()


def check(joint: Joint) -> None:
    got = joint.stock("received", stream=1, timeout=LIMIT)
    assert got["eof"] and (got["size"], got["sha256"]) == (len(TEXT), digest(TEXT))
    assert joint.stock("messages", count=1)["first"] == STATUS


@pytest.mark.slow
@pytest.mark.parametrize("role", ROLES)
def test_every_line_arrives_then_the_status_then_the_end(pair: Duo, role: Role) -> None:
    setup = {"channel": {}, "readers": [{"stream": 1, "chunk": LINE, "delay": 0.002}]}
    joint = join(pair, role, stock=setup)
    giving = Task(give, joint)
    check(joint)
    giving.result()


@pytest.mark.slow
@pytest.mark.parametrize("role", ROLES)
def test_a_peer_that_stops_for_three_seconds_in_the_middle(pair: Duo, role: Role) -> None:
    joint = join(pair, role, stock={"channel": {"sleep": 3.0, "sleep_at": 1000}, "readers": [1]})
    writer = joint.link.open_writer(1)
    write_lines(joint, writer, TEXT[: 1000 * LINE])
    writer.flush()
    joint.link.channel.send(Numbered(1000), timeout=LIMIT)  # its handler blocks the whole peer
    write_lines(joint, writer, TEXT[1000 * LINE :])
    writer.close()
    got = joint.stock("received", stream=1, timeout=LIMIT)
    assert got["eof"] and got["sha256"] == digest(TEXT)


@pytest.mark.slow
@pytest.mark.parametrize("role", ROLES)
def test_an_endless_writer_stops_when_it_is_told(pair: Duo, role: Role) -> None:
    stop, stopped_at = threading.Event(), []
    writers: list[StreamWriter] = []

    def told(message: Numbered) -> bool:
        stopped_at.append(writers[0].sent)
        stop.set()
        return True

    joint = join(pair, role, stock={"readers": [1]})
    joint.link.channel.register(Numbered)
    joint.link.channel.on_message(told)
    writer = joint.link.open_writer(1, compression="never")
    writers.append(writer)
    block = random_bytes("endless", 4096)

    def endless() -> None:
        while not stop.is_set():
            writer.write(block)

    giving = Task(endless)
    arrived = joint.stock("received", stream=1, size=200_000, timeout=LIMIT)["size"]
    assert arrived >= 200_000
    joint.stock("channel")
    joint.stock("message", count=1, size=1)
    giving.result()
    writer.close()
    total = joint.stock("received", stream=1, timeout=LIMIT)["size"]
    assert total == writer.written and total - stopped_at[0] <= BUFFER + len(block)


@pytest.mark.slow
def test_a_slow_reader_does_not_slow_the_other_links(pair: Duo) -> None:
    delays = [0.003, 0.0, 0.0]
    joints = [
        join(pair, "initiator", stock={"channel": {}, "readers": [{"stream": 1, "chunk": LINE, "delay": delay}]})
        for delay in delays
    ]
    began = monotonic()
    giving = [Task(give, joint) for joint in joints]
    for joint, task in list(zip(joints, giving, strict=True))[1:]:
        check(joint)
        task.result()
    others = monotonic() - began
    check(joints[0])
    giving[0].result()
    assert others < monotonic() - began
