"""Pollers: readiness, changes from other threads, wake-ups, and descriptor numbers that come back."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from rnsfast.osio.poller import READ, WRITE, EpollPoller, SelectorPoller, open_poller
from tests.fakes import PATIENCE

Pair = tuple[socket.socket, socket.socket]
AnyPoller = EpollPoller | SelectorPoller


@pytest.fixture
def poller(variant: str) -> Iterator[AnyPoller]:
    made = open_poller()
    assert isinstance(made, SelectorPoller if variant == "portable" else EpollPoller)
    yield made
    made.close()
    made.close()


def test_reports_what_is_asked_for_as_long_as_it_is_so(poller: AnyPoller, sockets: Pair) -> None:
    left, right = sockets
    fd = left.fileno()
    poller.watch(fd, READ)
    assert poller.wait(0) == []
    right.send(b"x")
    assert poller.wait(PATIENCE) == [(fd, READ)]
    assert poller.wait(PATIENCE) == [(fd, READ)]
    poller.rewatch(fd, READ | WRITE)
    assert poller.wait(PATIENCE) == [(fd, READ | WRITE)]
    poller.rewatch(fd, WRITE)
    assert poller.wait(PATIENCE) == [(fd, WRITE)]
    poller.rewatch(fd, 0)
    assert poller.wait(0) == []
    poller.rewatch(fd, READ)
    assert poller.wait(PATIENCE) == [(fd, READ)]
    poller.unwatch(fd)
    assert poller.wait(0) == []
    poller.unwatch(fd)
    poller.rewatch(fd, READ)
    assert poller.wait(0) == []


@pytest.mark.parametrize("events", [READ, WRITE, READ | WRITE])
def test_hang_up_is_reported_to_whoever_waits_for_anything(poller: AnyPoller, sockets: Pair, events: int) -> None:
    sockets[1].close()
    poller.watch(sockets[0].fileno(), events)
    assert poller.wait(PATIENCE) == [(sockets[0].fileno(), events)]


def test_hang_up_of_a_paused_descriptor_does_not_spin(poller: AnyPoller, sockets: Pair) -> None:
    poller.watch(sockets[0].fileno(), 0)
    sockets[1].close()
    assert poller.wait(0.01) == []


def test_wake_before_during_and_many_times(poller: AnyPoller) -> None:
    poller.wake()
    poller.wake()
    assert poller.wait(None) == []  # does not wait
    returned, about_to_wait = threading.Event(), threading.Event()

    def waiter() -> None:
        about_to_wait.set()
        poller.wait(None)
        returned.set()

    for _ in range(20):
        returned.clear()
        about_to_wait.clear()
        thread = threading.Thread(target=waiter)
        thread.start()
        assert about_to_wait.wait(PATIENCE)
        for _ in range(5):
            poller.wake()
        assert returned.wait(PATIENCE)
        thread.join(PATIENCE)
        assert not thread.is_alive()
        poller.wait(0)  # takes what a late wake left behind
    assert poller.wait(0) == []


def test_changes_by_another_thread_reach_a_wait_that_has_begun(poller: AnyPoller, sockets: Pair) -> None:
    found: list[tuple[int, int]] = []
    done = threading.Event()

    def waiter() -> None:
        while not found:
            found.extend(poller.wait(PATIENCE))
        done.set()

    thread = threading.Thread(target=waiter)
    thread.start()
    sockets[1].send(b"x")
    poller.watch(sockets[0].fileno(), READ)
    assert done.wait(PATIENCE)
    thread.join(PATIENCE)
    assert found == [(sockets[0].fileno(), READ)]


def test_event_of_an_earlier_owner_of_the_number_is_dropped(poller: AnyPoller) -> None:
    """What the system found before the number got a new owner says nothing about that owner."""
    old, old_peer = socket.socketpair()
    fd = old.fileno()
    poller.watch(fd, READ)
    old_peer.send(b"x")
    mark = poller._serial
    stale = [(fd, READ)]  # as the system would have reported it
    poller.unwatch(fd)
    old.close()
    new, new_peer = socket.socketpair()
    if new.fileno() != fd:  # make sure that it is the same number
        number = new.detach()
        new = socket.socket(fileno=os.dup2(number, fd))
        os.close(number)
    poller.watch(fd, READ)
    assert poller._end(stale, mark) == []
    assert poller.wait(0) == []
    new_peer.send(b"y")
    assert poller.wait(PATIENCE) == [(fd, READ)]
    poller.unwatch(fd)
    for sock in (old_peer, new, new_peer):
        sock.close()


def test_a_descriptor_closed_while_watched_does_no_harm(poller: AnyPoller) -> None:
    gone, peer = socket.socketpair()
    fd = gone.fileno()
    poller.watch(fd, READ)
    gone.close()
    poller.rewatch(fd, READ | WRITE)
    poller.wait(0)
    poller.unwatch(fd)
    assert poller.wait(0) == []
    one, two = socket.socketpair()
    poller.watch(one.fileno(), READ)
    two.send(b"x")
    assert poller.wait(PATIENCE) == [(one.fileno(), READ)]
    poller.unwatch(one.fileno())
    for sock in (peer, one, two):
        sock.close()


def test_hundreds_of_descriptors(poller: AnyPoller) -> None:
    pairs = [socket.socketpair() for _ in range(300)]
    for left, right in pairs:
        poller.watch(left.fileno(), READ)
        right.send(b"x")
    seen: set[int] = set()
    while len(seen) < 300:
        found = poller.wait(PATIENCE)
        assert found
        for fd, events in found:
            assert events == READ
            seen.add(fd)
            poller.unwatch(fd)
    for left, right in pairs:
        left.close()
        right.close()


def test_open_close_stress_with_a_waiting_thread(poller: AnyPoller) -> None:
    """Descriptors come and go on one thread while another waits; every registration that has data is reported."""
    seen: dict[int, threading.Event] = {}
    stop = False
    failures: list[BaseException] = []

    def waiter() -> None:
        try:
            while not stop:
                for fd, _ in poller.wait(PATIENCE):
                    if (event := seen.get(fd)) is not None:
                        poller.rewatch(fd, 0)
                        event.set()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=waiter)
    thread.start()
    for _ in range(300):
        left, right = socket.socketpair()
        event = seen[left.fileno()] = threading.Event()
        poller.watch(left.fileno(), READ)
        right.send(b"x")
        assert event.wait(PATIENCE)
        poller.unwatch(left.fileno())
        seen.pop(left.fileno())
        left.close()
        right.close()
    stop = True
    poller.wake()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert not failures
