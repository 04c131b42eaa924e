"""Sending datagrams on macOS: what sendmsg_x is given, and what is made of every answer."""

from __future__ import annotations

import errno
import socket

import pytest

from rnsfast.osio.contract import TxState
from rnsfast.osio.darwin import DarwinDatagramIO
from rnsfast.osio.peers import make_peer
from rnsfast.osio.verdicts import REPEATS
from tests.osio.darwin_fakes import (
    ALL,
    EMPTY,
    FIRST,
    REFUSALS,
    Entry,
    Fail,
    Make,
    Scripted,
    lines,
    packets,
)

# -- sending: counts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("counts", [[ALL], [1, ALL], [1, 1, 1, ALL], [2, ALL]], ids=str)
def test_what_a_call_did_not_take_goes_into_the_next_one(scripted_darwin: Make, counts: list[int]) -> None:
    io, calls = scripted_darwin(sendmsg_x=counts)
    items = packets(8)
    result = io.send(items)
    assert (result.state, result.taken, result.sent, result.rejected) == (TxState.DONE, 8, 8, ())
    assert calls.wire == items
    assert calls.counts == [8 - sum(counts[:i]) for i in range(len(counts))]
    assert io.stats.tx_short == len(counts) - 1
    assert (io.stats.tx_calls, io.stats.tx_packets) == (len(counts), 8)
    assert io.stats.tx_bytes == sum(map(len, items))


@pytest.mark.parametrize("counts", [[ALL], [1, ALL], [1, 1, 1, ALL], [2, ALL]], ids=str)
def test_skipped_packets_do_not_shift_the_counts(scripted_darwin: Make, counts: list[int]) -> None:
    io, calls = scripted_darwin(sendmsg_x=counts, options={"max_packet": 100})
    good = packets(7)
    items = [b"", good[0], b"x" * 101, *good[1:5], b"", b"", *good[5:], b"y" * 101]
    result = io.send(items)
    assert (result.state, result.taken, result.sent) == (TxState.DONE, len(items), 7)
    assert result.rejected == (
        (0, errno.EINVAL),
        (2, errno.EMSGSIZE),
        (7, errno.EINVAL),
        (8, errno.EINVAL),
        (11, errno.EMSGSIZE),
    )
    assert calls.wire == good


def test_the_last_packet_of_a_short_count_goes_out_by_the_plain_call(scripted_darwin: Make) -> None:
    io, calls = scripted_darwin(sendmsg_x=[3], sendto=[ALL])
    items = packets(4)
    assert io.send(items).state is TxState.DONE
    assert calls.wire == items


def test_one_packet_goes_out_by_the_plain_call(scripted_darwin: Make) -> None:
    io, calls = scripted_darwin(sendto=[ALL, ALL])
    assert io.send([b"one"]).sent == io.send_one(b"two").sent == 1
    assert calls.calls == ["sendto", "sendto"]
    assert calls.wire == [b"one", b"two"]


def test_more_than_the_bound_is_cut_into_calls(scripted_darwin: Make) -> None:
    io, calls = scripted_darwin(sendmsg_x=[ALL, ALL, ALL], options={"max_batch": 5})
    items = packets(13)
    assert io.send(items).sent == 13
    assert calls.counts == [5, 5, 3]
    assert calls.wire == items


@pytest.mark.parametrize(("bad", "why"), [(b"", errno.EINVAL), (b"x" * 101, errno.EMSGSIZE)], ids=["empty", "large"])
def test_one_invalid_packet_is_enough_to_look_at_each(scripted_darwin: Make, bad: bytes, why: int) -> None:
    io, calls = scripted_darwin(sendmsg_x=[ALL], options={"max_packet": 100})
    items = packets(3)
    result = io.send([items[0], bad, *items[1:]])
    assert (result.taken, result.sent, result.rejected) == (4, 3, ((1, why),))
    assert calls.wire == items


def test_packets_from_a_start_on(scripted_darwin: Make) -> None:
    io, calls = scripted_darwin(sendmsg_x=[2, ALL])
    items = packets(9)
    result = io.send(items, None, 3)
    assert (result.taken, result.sent) == (9, 6)
    assert calls.wire == items[3:]


@pytest.mark.parametrize("bound", [0, 129])
def test_a_bound_outside_of_1_to_128_is_refused(bound: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock, pytest.raises(ValueError, match="128"):
        DarwinDatagramIO(sock, max_batch=bound, sys=Scripted())


@pytest.mark.parametrize("bound", [1, 64, 128])
def test_the_bound_is_the_one_asked_for(scripted_darwin: Make, bound: int) -> None:
    io, _ = scripted_darwin(options={"max_batch": bound})
    assert (io.caps.max_rx, io.caps.max_tx, io.caps.backend) == (bound, bound, "darwin-msgx")
    assert io.make_batch().capacity == bound


# -- sending: errors (protocol 09, 6.1) -----------------------------------------------------------------------------


def test_too_large_is_said_of_the_first_packet_which_goes_alone(scripted_darwin: Make) -> None:
    io, calls = scripted_darwin(sendmsg_x=[Fail(errno.EMSGSIZE), ALL], sendto=[Fail(errno.EMSGSIZE)])
    items = packets(5)
    result = io.send(items)
    assert (result.state, result.sent, result.rejected) == (TxState.DONE, 4, ((0, errno.EMSGSIZE),))
    assert calls.calls == ["sendmsg_x", "sendto", "sendmsg_x"]
    assert calls.offered == [items, items[:1], items[1:]]
    assert calls.wire == items[1:]
    assert io.stats.tx_calls == 3


def test_too_large_in_the_middle_shows_as_a_short_count_first(scripted_darwin: Make) -> None:
    io, calls = scripted_darwin(sendmsg_x=[2, Fail(errno.EMSGSIZE), ALL], sendto=[Fail(errno.EMSGSIZE)])
    items = packets(6)
    result = io.send(items)
    assert (result.sent, result.rejected) == (5, ((2, errno.EMSGSIZE),))
    assert calls.wire == items[:2] + items[3:]


def test_a_packet_that_the_plain_call_takes_after_all_is_sent_once(scripted_darwin: Make) -> None:
    io, calls = scripted_darwin(sendmsg_x=[Fail(errno.EMSGSIZE), ALL], sendto=[ALL])
    items = packets(5)
    result = io.send(items)
    assert (result.state, result.sent, result.rejected) == (TxState.DONE, 5, ())
    assert calls.wire == items


def test_too_large_and_then_a_full_queue_keeps_that_packet(scripted_darwin: Make) -> None:
    io, calls = scripted_darwin(sendmsg_x=[2, Fail(errno.EMSGSIZE)], sendto=[EMPTY])
    items = packets(6)
    result = io.send(items)
    assert (result.state, result.taken, result.sent, result.rejected) == (TxState.BLOCKED, 2, 2, ())
    assert calls.wire == items[:2]


def test_a_full_queue_blocks_with_what_was_taken(scripted_darwin: Make) -> None:
    io, calls = scripted_darwin(sendmsg_x=[3, EMPTY, ALL])
    items = packets(8)
    result = io.send(items)
    assert (result.state, result.taken, result.sent, result.errno) == (TxState.BLOCKED, 3, 3, errno.EAGAIN)
    assert io.send(items, None, result.taken).state is TxState.DONE
    assert calls.wire == items
    assert io.stats.tx_blocked == 1


def test_an_interrupted_call_is_made_again(scripted_darwin: Make) -> None:
    io, calls = scripted_darwin(sendmsg_x=[Fail(errno.EINTR)] * 20 + [ALL])
    items = packets(4)
    assert io.send(items).sent == 4
    assert calls.wire == items


def test_no_buffers_is_repeated_and_then_costs_one_packet(scripted_darwin: Make) -> None:
    io, calls = scripted_darwin(sendmsg_x=[Fail(errno.ENOBUFS)] * (REPEATS + 1) + [ALL])
    items = packets(5)
    result = io.send(items)
    assert (result.state, result.sent, result.rejected) == (TxState.DONE, 4, ((0, errno.ENOBUFS),))
    assert calls.wire == items[1:]


def test_no_buffers_for_a_moment_costs_nothing(scripted_darwin: Make) -> None:
    io, calls = scripted_darwin(
        sendmsg_x=[Fail(errno.ENOBUFS)] * REPEATS + [2] + [Fail(errno.ENOBUFS)] * REPEATS + [ALL]
    )
    items = packets(5)
    assert io.send(items).sent == 5
    assert calls.wire == items


LISTED = {errno.EINTR, errno.EAGAIN, errno.ENOBUFS, errno.EMSGSIZE, *REFUSALS}
UNLISTED = sorted(set(errno.errorcode) - LISTED)


@pytest.mark.parametrize("error", UNLISTED, ids=errno.errorcode.get)
def test_after_any_other_error_nothing_is_offered_again(scripted_darwin: Make, error: int) -> None:
    io, calls = scripted_darwin(sendmsg_x=[2, Fail(error)])
    items = packets(6)
    result = io.send(items)
    assert (result.state, result.taken, result.sent, result.errno) == (TxState.UNKNOWN, 2, 2, error)
    assert calls.offered == [items, items[2:]]
    assert io.stats.tx_unknown == 4
    assert io.fallbacks == {}


def test_an_unknown_outcome_does_not_end_batching(scripted_darwin: Make) -> None:
    io, calls = scripted_darwin(sendmsg_x=[Fail(errno.EIO), ALL])
    assert io.send(packets(3)).state is TxState.UNKNOWN
    assert io.send(packets(4)).state is TxState.DONE
    assert calls.wire == packets(4)


def test_a_call_that_took_nothing_and_says_nothing_is_not_repeated(scripted_darwin: Make) -> None:
    io, calls = scripted_darwin(sendmsg_x=[2, 0])
    result = io.send(packets(6))
    assert (result.state, result.taken, result.sent) == (TxState.BROKEN, 2, 2)
    assert calls.calls == ["sendmsg_x"] * 2


def test_more_taken_than_offered_is_unknown_and_ends_batching(
    scripted_darwin: Make, caplog: pytest.LogCaptureFixture
) -> None:
    io, calls = scripted_darwin(sendmsg_x=[6], sendto=[ALL] * 3)
    result = io.send(packets(5))
    assert (result.state, result.taken) == (TxState.UNKNOWN, 0)
    assert io.send(packets(3)).sent == 3
    assert calls.calls == ["sendmsg_x", *["sendto"] * 3]
    assert len(lines(caplog, "sendmsg_x")) == 1


@pytest.mark.parametrize("error", REFUSALS, ids=errno.errorcode.get)
@pytest.mark.parametrize("before", [[], [2]], ids=["first call", "after a short count"])
def test_a_refused_sendmsg_x_sends_the_same_batch_plainly_and_for_good(
    scripted_darwin: Make, caplog: pytest.LogCaptureFixture, error: int, before: list[int]
) -> None:
    items = packets(6)
    for _ in range(2):  # two objects, one line in the log
        left = 6 - sum(before)
        io, calls = scripted_darwin(sendmsg_x=[*before, Fail(error)], sendto=[ALL] * (left + 6))
        result = io.send(items)
        assert (result.state, result.sent, result.rejected) == (TxState.DONE, 6, ())
        assert io.send(items).sent == 6
        assert calls.wire == items * 2
        assert calls.calls == ["sendmsg_x"] * (len(before) + 1) + ["sendto"] * (left + 6)
        assert io.fallbacks == {"sendmsg_x": errno.errorcode[error]}
    found = lines(caplog, "sendmsg_x")
    assert len(found) == 1 and errno.errorcode[error] in found[0]


def test_a_plain_call_that_is_not_permitted_costs_that_packet_only(scripted_darwin: Make) -> None:
    io, calls = scripted_darwin(sendmsg_x=[Fail(errno.EPERM)], sendto=[ALL, Fail(errno.EPERM), ALL])
    items = packets(3)
    result = io.send(items)
    assert (result.state, result.sent, result.rejected) == (TxState.DONE, 2, ((1, errno.EPERM),))
    assert calls.wire == [items[0], items[2]]


def test_a_blocked_plain_path_resumes_where_it_was(scripted_darwin: Make) -> None:
    io, calls = scripted_darwin(sendmsg_x=[Fail(errno.ENOSYS)], sendto=[ALL, ALL, EMPTY, ALL, ALL])
    items = packets(4)
    result = io.send(items)
    assert (result.state, result.taken, result.sent) == (TxState.BLOCKED, 2, 2)
    assert io.send(items, None, 2).state is TxState.DONE
    assert calls.wire == items


def test_missing_calls_leave_the_plain_path(scripted_darwin: Make, caplog: pytest.LogCaptureFixture) -> None:
    items = packets(3)
    for _ in range(2):
        io, calls = scripted_darwin(
            missing=("recvmsg_x", "sendmsg_x"), sendto=[ALL] * 3, recvfrom=[Entry(b"one", FIRST), EMPTY]
        )
        assert io.caps.backend == "portable"
        assert set(io.fallbacks) == {"recvmsg_x", "sendmsg_x"}
        assert io.send(items).sent == 3
        batch = io.make_batch()
        assert io.recv(batch) == 1 and batch.take_all() == [b"one"]
        assert calls.wire == items
    assert len(lines(caplog, "recvmsg_x")) == len(lines(caplog, "sendmsg_x")) == 1


# -- sending: peers ---------------------------------------------------------------------------------------------------


def test_an_unconnected_socket_sends_one_by_one_and_says_nothing_about_it(
    scripted_darwin: Make, caplog: pytest.LogCaptureFixture
) -> None:
    io, calls = scripted_darwin(
        connected=False, missing=("sendmsg_x",), sendto=[ALL, Fail(errno.EHOSTUNREACH), ALL, ALL]
    )
    items, peer = packets(4), make_peer("10.0.0.1", 4001, flavour="darwin")
    result = io.send(items, peer)
    assert (result.state, result.sent, result.rejected) == (TxState.DONE, 3, ((1, errno.EHOSTUNREACH),))
    assert calls.calls == ["sendto"] * 4
    assert not io.fallbacks and not caplog.records


def test_an_unconnected_socket_without_a_peer_reports_every_packet(scripted_darwin: Make) -> None:
    io, _ = scripted_darwin(connected=False, sendto=[Fail(errno.EDESTADDRREQ)] * 3)
    result = io.send(packets(3))
    assert (result.state, result.rejected) == (TxState.DONE, tuple((i, errno.EDESTADDRREQ) for i in range(3)))


def test_peers_never_reach_sendmsg_x(scripted_darwin: Make) -> None:
    io, calls = scripted_darwin(sendto=[ALL] * 4)
    peer = make_peer("10.0.0.1", 4001, flavour="darwin")
    assert io.send(packets(2), peer).sent == 2
    assert io.send(packets(2), [peer, peer]).sent == 2
    assert calls.calls == ["sendto"] * 4


def test_a_peer_of_another_family_is_refused_without_a_call(scripted_darwin: Make) -> None:
    io, calls = scripted_darwin(connected=False, sendto=[ALL, ALL])
    good, bad = make_peer("10.0.0.1", 1, flavour="darwin"), make_peer("::1", 1, flavour="darwin")
    items = packets(3)
    result = io.send(items, [good, bad, good])
    assert (result.sent, result.rejected) == (2, ((1, errno.EAFNOSUPPORT),))
    assert calls.wire == [items[0], items[2]]
