"""The algorithms that all packet back ends share, over a back end by script.  Protocol 09, sections 4.1, 4.2, 4.5."""

from __future__ import annotations

import errno
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rnsfast.osio.contract import Caps, IOBroken, IOClosed, Kind, Peer, RxBatch, TxState
from rnsfast.osio.packets import EMPTY_FILLS, PacketIO, Peers
from rnsfast.osio.peers import make_peer
from rnsfast.osio.verdicts import REPEATS, SEND, Verdict

PATIENCE = 10.0
PRIVATE = 9999  # an error that loses the count: what was offered may have left
V4, V6 = make_peer("127.0.0.1", 1), make_peer("::1", 1)
FAMILY = V4.family

Step = tuple[int, int]  # taken (-1 for all), errno
Fill = tuple[list[bytes], int, int]  # entries, refused ones, errno


class Scripted(PacketIO):
    """Its descriptor is a pipe, so that waits are real. A call beyond the script fails the test."""

    def __init__(
        self, steps: Sequence[Step] = (), *, fills: Sequence[Fill] = (), max_tx: int = 8, max_packet: int = 100
    ) -> None:
        super().__init__(Caps(Kind.DATAGRAM, "scripted", 8, max_tx, max_packet, True, 1, True), FAMILY)
        self.steps, self.fills = deque(steps), deque(fills)
        self.wire: list[bytes] = []
        self.offers: list[list[bytes]] = []
        self.pipe = os.pipe()
        self.on_call: Callable[[], None] = lambda: None

    def _number(self) -> int:
        return self.pipe[0]

    def _release(self) -> None:
        for fd in self.pipe:
            os.close(fd)

    def _take(self, into: RxBatch) -> int:
        assert self._rx_lock.locked() and self.fills, "a receive beyond the script"
        entries, refused, error = self.fills.popleft()
        into.add_many(entries[: into.capacity])
        into.dropped += refused
        return error

    def _offer(self, items: Sequence[bytes]) -> tuple[int, int]:
        assert self._tx_lock.locked() and self.steps, "a send beyond the script"
        self.on_call()
        self.offers.append(list(items))
        taken, error = self.steps.popleft()
        taken = len(items) if taken < 0 else min(taken, len(items))
        self.wire += items[:taken]
        return taken, error

    def _submit(self, items: Sequence[bytes], peers: Peers, first: int, stop: int) -> tuple[int, int]:
        assert stop - first >= 2, "one packet has its own call"
        return self._offer(items[first:stop])

    def _submit_one(self, item: bytes, peer: Peer | None) -> int:
        taken, error = self._offer([item])
        return 0 if taken else error

    def _judge(self, error: int, items: Sequence[bytes], at: int) -> tuple[Verdict, int]:
        if error == PRIVATE:
            return Verdict.UNKNOWN, 1
        return super()._judge(error, items, at)


Make = Callable[..., Scripted]
ALL = (-1, 0)


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Scripted] = []

    def maker(*steps: Step, **options: object) -> Scripted:
        made.append(Scripted(steps, **options))  # type: ignore[arg-type]
        return made[-1]

    yield maker
    for io in made:
        io.close()


def numbered(count: int) -> list[bytes]:
    return [bytes([n, n]) for n in range(count)]


# -- sending ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", [[ALL], [(1, 0), ALL], [(1, 0), (1, 0), (1, 0), ALL], [(2, 0), ALL], [(3, 0), ALL]])
def test_short_counts_agree_with_holes_in_the_batch(make: Make, script: list[Step]) -> None:
    io = make(*script)
    items = numbered(7)
    items[0], items[3], items[6] = b"", bytes(101), b""
    result = io.send(items, V4)
    assert (result.state, result.taken, result.sent) == (TxState.DONE, 7, 4)
    assert result.rejected == ((0, errno.EINVAL), (3, errno.EMSGSIZE), (6, errno.EINVAL))
    assert io.wire == [items[n] for n in (1, 2, 4, 5)] and not io.steps
    assert io.stats.tx_short == len(script) - 1 and io.stats.tx_packets == 4 and io.stats.tx_bytes == 8


@pytest.mark.parametrize("count", [0, 1, 2, 8, 9, 10, 16, 17])
def test_chunks_are_as_large_as_allowed_and_one_packet_has_its_own_call(make: Make, count: int) -> None:
    io = make(*[ALL] * 3)
    assert io.send(numbered(count), V4).sent == count and io.wire == numbered(count)
    assert [len(offer) for offer in io.offers] == [min(8, count - at) for at in range(0, count, 8)]


def test_a_batch_of_nothing_but_refused_packets_makes_no_call(make: Make) -> None:
    io = make()
    result = io.send([b"", bytes(101), b"x"], [V4, V4, V6])
    assert (result.state, result.taken, result.sent) == (TxState.DONE, 3, 0)
    assert result.rejected == ((0, errno.EINVAL), (1, errno.EMSGSIZE), (2, errno.EAFNOSUPPORT))
    assert io.stats.tx_rejected == 3


@pytest.mark.parametrize(
    ("item", "peer", "error"),
    [(b"", V4, errno.EINVAL), (bytes(101), V4, errno.EMSGSIZE), (b"x", V6, errno.EAFNOSUPPORT)],
    ids=["empty", "oversize", "family"],
)
def test_one_packet_is_refused_for_the_same_reason_as_among_many(
    make: Make, item: bytes, peer: Peer, error: int
) -> None:
    io = make(ALL)
    assert io.send_one(item, peer).rejected == io.send([item], peer).rejected == ((0, error),)
    assert io.send([item, b"y"], [peer, V4]).rejected == ((0, error),)


def test_one_packet_in_the_middle_of_a_batch_keeps_its_number(make: Make) -> None:
    io = make((0, errno.EPERM))
    result = io.send(numbered(5), V4, start=4)
    assert (result.taken, result.rejected, io.offers) == (5, ((4, errno.EPERM),), [[numbered(5)[4]]])


def test_the_end_of_a_batch_is_settled_without_a_call(make: Make) -> None:
    io = make()
    result = io.send(numbered(3), V4, start=3)
    assert (result.state, result.taken, result.sent) == (TxState.DONE, 3, 0)


def test_what_may_have_left_is_never_offered_again(make: Make) -> None:
    io = make((2, 0), (0, PRIVATE))
    items = numbered(6)
    items[3] = b""
    result = io.send(items, V4)
    assert (result.state, result.taken, result.sent, result.errno) == (TxState.UNKNOWN, 2, 2, PRIVATE)
    assert not io.steps and io.stats.tx_unknown == 4
    assert not result.rejected, "the invalid one is behind what is settled"


def test_one_packet_that_may_have_left_is_told_too(make: Make) -> None:
    io = make((0, PRIVATE))
    result = io.send_one(b"x", V4)
    assert (result.state, result.taken, result.sent) == (TxState.UNKNOWN, 0, 0) and io.stats.tx_unknown == 1


@pytest.mark.parametrize("error", sorted(number for number, verdict in SEND.items() if verdict is Verdict.BROKEN))
def test_an_unusable_descriptor_is_told_and_not_asked_again(make: Make, error: int) -> None:
    io = make((1, 0), (0, error), (0, error))
    result = io.send(numbered(3), V4)
    assert (result.state, result.taken, result.errno) == (TxState.BROKEN, 1, error)
    assert io.send_one(b"x", V4).state is TxState.BROKEN and not io.steps


def test_no_progress_without_a_reason_is_not_looped_on(make: Make) -> None:
    io = make((0, 0))
    assert io.send(numbered(3), V4).state is TxState.BROKEN and len(io.offers) == 1


@pytest.mark.parametrize("single", [True, False])
def test_interrupted_calls_are_repeated_as_often_as_it_takes(make: Make, single: bool) -> None:
    io = make(*[(0, errno.EINTR)] * 50, ALL)
    assert io.send(numbered(1 if single else 3), V4).state is TxState.DONE
    assert io.wire == numbered(1 if single else 3)


@pytest.mark.parametrize("single", [True, False])
def test_no_buffer_space_is_repeated_a_few_times(make: Make, single: bool) -> None:
    """Once more than it is repeated, and the packet is dropped; and every packet has its repeats."""
    io = make(*[(0, errno.ENOBUFS)] * (REPEATS + 1), *[(0, errno.ENOBUFS)] * REPEATS, ALL)
    items = numbered(2)
    if single:
        results = [io.send_one(item, V4) for item in items]
        assert [result.rejected for result in results] == [((0, errno.ENOBUFS),), ()]
    else:
        assert io.send(items, V4).rejected == ((0, errno.ENOBUFS),)
    assert io.wire == items[1:] and not io.steps


def test_a_count_and_an_error_at_once_are_both_true(make: Make) -> None:
    """Back ends that go packet by packet know what stopped them."""
    io = make((2, errno.EACCES), ALL)
    result = io.send(numbered(5), V4)
    assert result.rejected == ((2, errno.EACCES),) and io.wire == [numbered(5)[n] for n in (0, 1, 3, 4)]


@pytest.mark.parametrize("error", [errno.EPIPE, errno.EBADF, errno.EAGAIN, errno.ENOBUFS, PRIVATE])
@pytest.mark.parametrize("single", [True, False])
def test_an_error_while_it_is_being_closed_is_about_that(make: Make, error: int, single: bool) -> None:
    """Another thread closes in the middle of the call: no packet is refused, none is unknown."""
    io = make(*([] if single else [(2, 0)]), (0, error))
    shut, closers = threading.Event(), []
    io._shut = shut.set  # type: ignore[method-assign]

    def close() -> None:
        if len(io.steps) == 1:
            closers.append(threading.Thread(target=io.close))
            closers[0].start()
            assert shut.wait(PATIENCE)

    io.on_call = close
    result = io.send_one(b"x", V4) if single else io.send(numbered(5), V4)
    closers[0].join(PATIENCE)
    assert (result.state, result.taken, result.rejected) == (TxState.CLOSED, 0 if single else 2, ())
    assert io.stats.tx_rejected == io.stats.tx_unknown == io.stats.tx_blocked == 0


def test_after_close_nothing_is_offered(make: Make) -> None:
    io = make()
    io.close()
    for result in (io.send(numbered(3), V4), io.send(numbered(3), V4, start=2), io.send_one(b"x", V4)):
        assert result.state is TxState.CLOSED and not result.sent
    assert io.send(numbered(3), V4, start=2).taken == 2


ERRORS = [
    errno.EINTR,
    errno.ENOBUFS,
    errno.EPERM,
    errno.EAGAIN,
    errno.EMSGSIZE,
    errno.ECONNREFUSED,
    errno.EBADF,
    PRIVATE,
]


@settings(max_examples=200, deadline=None)
@given(
    valid=st.lists(st.booleans(), max_size=30),
    steps=st.lists(st.tuples(st.integers(0, 5), st.sampled_from([0, *ERRORS])).filter(any), max_size=20),
    max_tx=st.sampled_from([1, 2, 3, 8]),
)  # fmt: skip
def test_every_packet_is_out_refused_or_left_to_the_caller(valid: list[bool], steps: list[Step], max_tx: int) -> None:
    items = [bytes([n, n]) if good else b"" for n, good in enumerate(valid)]
    io = Scripted([*steps, *[ALL] * 100], max_tx=max_tx)
    start, sent, rejected, state = 0, 0, [], TxState.BLOCKED
    while state is TxState.BLOCKED:
        result = io.send(items, V4, start=start)
        assert start <= result.taken <= len(items)
        assert all(start <= index < result.taken for index, _ in result.rejected), "settled in this call"
        assert result.sent + len(result.rejected) == result.taken - start
        start, state = result.taken, result.state
        sent += result.sent
        rejected += [index for index, _ in result.rejected]
    stats = io.stats
    io.close()
    out = [item[0] for item in io.wire]
    assert out == sorted(set(out)), "each once, in order"
    assert len(out) == sent == stats.tx_packets and len(rejected) == stats.tx_rejected
    if state is TxState.DONE:
        assert start == len(items) and sorted(out + rejected) == list(range(len(items)))
    else:
        assert sorted(out + rejected) == list(range(start)), "nothing beyond `taken` is out"
        assert stats.tx_unknown == (len(items) - start if state is TxState.UNKNOWN else 0)
    for offer in io.offers:
        assert len(offer) <= max_tx


# -- receiving ----------------------------------------------------------------------------------------------------

NOTHING: Fill = ([], 0, errno.EAGAIN)


def test_an_error_after_packets_is_kept_for_the_next_receive(make: Make) -> None:
    io = make(fills=[([b"a", b"b"], 0, errno.EIO), ([b"c"], 0, 0)])
    batch = io.make_batch()
    assert io.recv(batch) == 2 and batch.take_all() == [b"a", b"b"]
    with pytest.raises(IOBroken) as told:
        io.recv(batch)
    assert told.value.errno == errno.EIO and len(io.fills) == 1, "no call in between"
    assert io.recv(batch) == 1


@pytest.mark.parametrize("error", [errno.ECONNREFUSED, errno.ENETDOWN, errno.ENOBUFS, errno.EMSGSIZE])
def test_a_passing_error_after_packets_is_forgotten(make: Make, error: int) -> None:
    io = make(fills=[([b"a"], 0, error), ([b"b"], 0, error), NOTHING])
    batch = io.make_batch()
    assert [io.recv(batch) for _ in range(3)] == [1, 1, 0]


def test_interrupted_takes_are_repeated_without_a_wait(make: Make) -> None:
    io = make(fills=[([], 0, errno.EINTR)] * 3 + [([b"a"], 0, 0)])
    assert io.recv(io.make_batch()) == 1


def test_refused_packets_do_not_end_the_receive_and_are_counted_together(make: Make) -> None:
    io = make(fills=[([], 3, 0), ([], 2, 0), ([b"a"], 1, errno.EAGAIN), NOTHING])
    batch = io.make_batch()
    assert io.recv(batch) == 1 and batch.dropped == io.stats.rx_dropped == 6
    assert io.recv(batch) == 0 and batch.dropped == 0 and io.stats.rx_dropped == 6


def test_a_flood_of_refused_packets_gives_the_caller_its_turn_back(make: Make) -> None:
    io = make(fills=[([], 8, 0)] * (EMPTY_FILLS + 1))
    batch = io.make_batch()
    assert io.recv(batch) == 0 and batch.dropped == 8 * EMPTY_FILLS and len(io.fills) == 1


def test_a_caller_that_waits_is_not_ended_by_refused_packets(make: Make) -> None:
    io = make(fills=[([], 1, errno.EAGAIN), ([b"a"], 0, 0)])
    os.write(io.pipe[1], b"!")
    assert io.recv(io.make_batch(), PATIENCE) == 1


def test_the_deadline_is_for_all_waits_together(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readable, but nothing there: as after a datagram with a wrong checksum."""
    clock, waits = [100.0], []
    io = make(fills=[NOTHING] * 4)

    def wait(timeout: float | None) -> int:
        waits.append(timeout)
        clock[0] += 2.0
        return 1 if timeout else 0

    monkeypatch.setattr(io, "wait", wait)
    monkeypatch.setattr("rnsfast.osio.packets.time.monotonic", lambda: clock[0])
    assert io.recv(io.make_batch(), 5.0) == 0
    assert waits == [5.0, 3.0, 1.0, 0.0]


def test_without_a_limit_there_is_no_deadline(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = []
    io = make(fills=[NOTHING, ([b"a"], 0, 0)])
    monkeypatch.setattr(io, "wait", lambda timeout: waits.append(timeout) or 1)
    assert io.recv(io.make_batch(), None) == 1 and waits == [None]


def test_after_close_a_receive_says_so_whatever_was_kept(make: Make) -> None:
    io = make(fills=[([b"a"], 0, errno.EIO)])
    batch = io.make_batch()
    assert io.recv(batch) == 1
    io.close()
    for timeout in (0.0, PATIENCE, None):
        with pytest.raises(IOClosed):
            io.recv(batch, timeout)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 8), st.integers(0, 3), st.sampled_from([0, errno.EAGAIN, errno.EINTR, errno.EIO])),
        max_size=20,
    )
)
def test_every_packet_is_handed_over_and_every_error_told_once(script: list[tuple[int, int, int]]) -> None:
    number, fills, expected = 0, [], []
    for count, refused, error in script:
        entries = [(number + n).to_bytes(2, "big") for n in range(count)]
        number += count
        expected += entries
        fills.append((entries, refused, error))
    io = Scripted(fills=[*fills, *[NOTHING] * 50])
    batch, found, told = io.make_batch(), [], 0
    while len(io.fills) >= 50 or io._kept:
        try:
            assert io.recv(batch) == batch.count
            found += batch.take_all()
        except IOBroken as error:
            told += 1
            assert error.errno == errno.EIO
    io.close()
    assert found == expected and told == sum(error == errno.EIO for _, _, error in script)
    assert io.stats.rx_packets == number and io.stats.rx_bytes == 2 * number
    assert io.stats.rx_dropped == sum(refused for _, refused, _ in script)
