"""Channel messages with a registered type between our node and a stock peer, both ways, in both roles."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import pytest

from interop.harness import workspace
from interop.ours import (
    LIMIT,
    ROLES,
    WAYS,
    Collector,
    Duo,
    Numbered,
    Role,
    Side,
    Task,
    drain,
    duo,
    join,
    pour,
    send_messages,
    take_messages,
)
from interop.seeded import data, digest, message_bytes, series_digest
from rnsfast import LinkClosed, MessageTooLarge

OFF = {"link_mtu_discovery": False}


@pytest.fixture(scope="module", params=WAYS, ids="-".join)
def pair(request: pytest.FixtureRequest) -> Iterator[Duo]:
    kind, ours = request.param
    with workspace() as space, duo(space, kind, ours) as made:
        yield made


@pytest.fixture(scope="module")
def narrow() -> Iterator[Duo]:
    with workspace() as space, duo(space, our_node=OFF, stock_node=OFF) as made:
        yield made


def exchange(pair: Duo, role: Role, count: int, size: int, timeout: float = LIMIT) -> None:
    """The same series in both directions at once."""
    collector = Collector()
    joint = join(pair, role, stock={"channel": {}}, ours=take_messages(collector))
    with joint.link:
        answer = joint.stock_begin("message", count=count, size=size, timeout=timeout)
        send_messages(joint.link, count, size, timeout=timeout)
        got = joint.stock("messages", count=count, timeout=timeout)
        assert got["in_order"] and (got["first"], got["last"]) == (0, count - 1)
        assert got["sha256"] == series_digest("m", count, size) == collector.wait(count, timeout)
        answer()
        assert joint.link.channel.flush(timeout)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("size", [0, 1, 300])
def test_messages_both_ways(pair: Duo, role: Role, size: int) -> None:
    exchange(pair, role, 200, size)


@pytest.mark.slow
@pytest.mark.parametrize("role", ROLES)
def test_five_thousand_messages_both_ways(pair: Duo, role: Role) -> None:
    exchange(pair, role, 5000, 100, timeout=28)


@pytest.mark.slow
@pytest.mark.parametrize("role", ROLES)
def test_five_thousand_messages_at_500(narrow: Duo, role: Role) -> None:
    exchange(narrow, role, 5000, 100, timeout=28)


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("role", ROLES)
def test_the_sequence_comes_round(pair: Duo, role: Role) -> None:
    exchange(pair, role, 66_000, 20, timeout=250)


@pytest.mark.parametrize("role", ROLES)
def test_the_largest_message(pair: Duo, role: Role) -> None:
    collector = Collector()
    joint = join(pair, role, stock={"channel": {}}, ours=take_messages(collector))
    with joint.link as link:
        size = link.channel.mdu - 4  # the number in front
        send_messages(link, 3, size)
        assert joint.stock("messages", count=3)["sha256"] == series_digest("m", 3, size)
        with pytest.raises(MessageTooLarge):
            link.channel.send(Numbered(3, bytes(size + 1)))
        joint.stock("message", count=3, size=size)
        assert collector.wait(3) == series_digest("m", 3, size)


@pytest.mark.parametrize("role", ROLES)
def test_an_echo_comes_back_in_order(pair: Duo, role: Role) -> None:
    collector = Collector()
    joint = join(pair, role, stock={"channel": {"echo": True}}, ours=take_messages(collector))
    with joint.link as link:
        send_messages(link, 300, 200)
        assert collector.wait(300) == series_digest("m", 300, 200)


def test_an_echo_of_ours_answers_from_the_handler(pair: Duo) -> None:
    """A handler of ours may send: nothing waits for it but its own link."""

    def echo(link: Any) -> None:
        link.channel.register(Numbered)
        link.channel.on_message(lambda message: link.channel.send(message, timeout=LIMIT))

    joint = join(pair, "responder", stock={"channel": {}}, ours=echo)
    with joint.link:
        joint.stock("message", count=300, size=200)
        assert joint.stock("messages", count=300)["sha256"] == series_digest("m", 300, 200)


@pytest.mark.parametrize("role", ROLES)
def test_a_handler_of_the_peers_that_blocks_for_two_seconds_does_not_end_the_link(pair: Duo, role: Role) -> None:
    joint = join(pair, role, stock={"channel": {"sleep": 2.0, "sleep_at": 5}})
    with joint.link as link:
        send_messages(link, 200, 100)
        assert joint.stock("messages", count=200)["sha256"] == series_digest("m", 200, 100)
        assert link.is_active


@pytest.mark.parametrize("role", ROLES)
def test_messages_can_be_received_without_a_handler(pair: Duo, role: Role) -> None:
    joint = join(pair, role, ours=lambda link: link.channel.register(Numbered))
    with joint.link as link:
        answer = joint.stock_begin("message", count=100, size=10)
        for number in range(100):
            message = link.channel.receive(LIMIT)
            assert (message.number, message.content) == (number, message_bytes("m", number, 10))
        answer()
        joint.stock("teardown")
        with pytest.raises(LinkClosed):
            link.channel.receive(LIMIT)


@pytest.mark.parametrize("role", ROLES)
def test_messages_and_streams_share_the_channel_in_order(pair: Duo, role: Role) -> None:
    collector, readers = Collector(), []

    def prepare(link: Any) -> None:
        take_messages(collector)(link)
        readers.append(link.open_reader(7))

    joint = join(pair, role, stock={"channel": {}, "readers": [7]}, ours=prepare)
    with joint.link as link:
        content = data("random", "beside", 500_000)
        giving, taking = Task(pour, link.open_writer(7), content), Task(drain, readers[0])
        answers = [
            joint.stock_begin("write", stream=7, kind="random", seed="beside", size=500_000),
            joint.stock_begin("message", count=50, size=20),
        ]
        send_messages(link, 50, 20)
        assert joint.stock("messages", count=50)["sha256"] == series_digest("m", 50, 20) == collector.wait(50)
        giving.result()
        assert joint.stock("received", stream=7)["sha256"] == digest(content)
        assert taking.result() == (500_000, digest(content))
        for answer in answers:
            answer()


@pytest.mark.parametrize("ours", ["listener", "connector"])
def test_small_requests_are_answered_on_one_link_while_others_are_busy(ours: Side) -> None:
    with workspace() as space, duo(space, ours=ours) as pair:
        busy = join(pair, "initiator", stock={"readers": [1]})
        giving = Task(pour, busy.link.open_writer(1), data("random", "busy", 10_000_000))
        answers: queue.SimpleQueue[int] = queue.SimpleQueue()

        def prepare(link: Any) -> None:
            link.channel.register(Numbered)
            link.channel.on_message(lambda message: answers.put(message.number))

        joint = join(pair, "initiator", stock={"channel": {"echo": True}}, ours=prepare)
        for number in range(100):
            joint.link.channel.send(Numbered(number, bytes(512)), timeout=LIMIT)
            assert answers.get(timeout=LIMIT) == number
        giving.result()
