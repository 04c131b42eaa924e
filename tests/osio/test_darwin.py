"""Receiving datagrams on macOS: what recvmsg_x is given, and what is made of every answer."""

from __future__ import annotations

import errno
import logging
import socket
import struct
from contextlib import ExitStack

import pytest

from rnsfast.osio import backend
from rnsfast.osio.contract import IOBroken, Kind, Peer, RxBatch
from rnsfast.osio.msgx import H_NAMELEN, STEP, Libsystem
from rnsfast.osio.peers import make_peer
from tests.osio.darwin_fakes import (
    EMPTY,
    FIRST,
    LONG,
    REFUSALS,
    SECOND,
    Entry,
    Fail,
    Fill,
    Kernel,
    Make,
    darwin_name,
    lines,
)

# -- receiving: what comes back ---------------------------------------------------------------------------------------


def test_a_batch_with_senders_is_handed_over_at_once(scripted_darwin: Make) -> None:
    io, calls = scripted_darwin(recvmsg_x=[Fill([Entry(b"one", FIRST), Entry(b"two" * 9, SECOND), Entry(b"3", FIRST)])])
    batch = io.make_batch()
    assert io.recv(batch) == 3
    assert batch.take_all() == [b"one", b"two" * 9, b"3"]
    assert batch.peers == [
        make_peer(*where, flavour="darwin") for where in (("10.0.0.1", 4001), ("10.0.0.2", 4002))
    ] + [batch.peers[0]]
    assert batch.peer(0) is batch.peer(2)
    assert batch.uniform is None
    assert calls.counts == [64]
    assert io.stats.rx_calls == 1 and io.stats.rx_packets == 3


def test_one_sender_marks_the_batch(scripted_darwin: Make) -> None:
    io, _ = scripted_darwin(recvmsg_x=[Fill([Entry(b"one", FIRST), Entry(b"two", FIRST)])])
    batch = io.make_batch()
    assert io.recv(batch) == 2
    assert batch.uniform is batch.peer(0) and batch.uniform is not None


def test_the_callers_capacity_and_the_bound_limit_a_call(scripted_darwin: Make) -> None:
    io, calls = scripted_darwin(recvmsg_x=[EMPTY, EMPTY, EMPTY, EMPTY])
    for capacity, slots in ((2, 2), (64, 64), (300, 300), (3, 40)):
        assert io.recv(RxBatch(capacity, 2049, slots)) == 0
    assert calls.counts == [2, 64, 64, 3]


def test_a_full_slot_was_cut_and_is_dropped(scripted_darwin: Make) -> None:
    sizes = [1, 99, 100, 101, 200]
    entries = [Entry(b"x" * size, FIRST) for size in sizes]
    io, _ = scripted_darwin(recvmsg_x=[Fill(entries), EMPTY], options={"max_packet": 100})
    batch = io.make_batch()
    assert batch.slot == 101
    assert io.recv(batch) == 3
    assert [len(entry) for entry in batch.take_all()] == [1, 99, 100]
    assert len(batch.peers) == 3
    assert batch.dropped == io.stats.rx_dropped == 2
    assert io.fallbacks == {}
    assert io.recv(batch) == 0


def test_a_small_batch_of_the_caller_still_notices_cut_packets(scripted_darwin: Make) -> None:
    io, _ = scripted_darwin(recvmsg_x=[Fill([Entry(b"x" * 49, FIRST), Entry(b"x" * 50, FIRST)])])
    batch = RxBatch(4, 50)
    assert io.recv(batch) == 1
    assert batch.dropped == 1


def test_empty_packets_are_dropped(scripted_darwin: Make) -> None:
    io, _ = scripted_darwin(
        recvmsg_x=[Fill([Entry(b"", FIRST), Entry(b"x", SECOND), Entry(b"", FIRST)]), Fill([Entry(b"", FIRST)]), EMPTY]
    )
    batch = io.make_batch()
    assert io.recv(batch) == 1
    assert batch.take_all() == [b"x"] and batch.peer(0) == make_peer("10.0.0.2", 4002, flavour="darwin")
    assert io.recv(batch) == 0
    assert io.stats.rx_dropped == 3


@pytest.mark.parametrize("flag", [0x10, 0x20], ids=["MSG_TRUNC", "MSG_CTRUNC"])
def test_an_entry_that_is_flagged_as_cut_is_dropped(scripted_darwin: Make, flag: int) -> None:
    io, _ = scripted_darwin(
        recvmsg_x=[Fill([Entry(b"a", FIRST), Entry(b"b", FIRST, flags=flag), Entry(b"c", FIRST, flags=0x80)])]
    )
    batch = io.make_batch()
    assert io.recv(batch) == 2
    assert batch.take_all() == [b"a", b"c"]


GOOD = Entry(b"good", FIRST)
IMPOSSIBLE = {
    "more datagrams than headers": Fill([GOOD] * 4, 5),
    "far more datagrams than headers": Fill([GOOD] * 4, 2**31 - 1),
    "longer than the slot": Fill([GOOD, Entry(b"x", FIRST, datalen=2050)]),
    "a length with the top bit": Fill([GOOD, Entry(b"x", FIRST, datalen=2**64 - 1)]),
    "no address": Fill([GOOD, Entry(b"x")]),
    "no room for the address": Fill([GOOD, Entry(b"x", FIRST, namelen=28)]),
    "a short address": Fill([GOOD, Entry(b"x", FIRST, namelen=15)]),
    "an enormous address": Fill([GOOD, Entry(b"x", FIRST, namelen=2**32 - 1)]),
    "an address of the other family": Fill([GOOD, Entry(b"x", LONG)]),
    "a length byte that is off": Fill([GOOD, Entry(b"x", b"\x1c" + FIRST[1:])]),
    "a family byte that is off": Fill([GOOD, Entry(b"x", FIRST[:1] + b"\x1e" + FIRST[2:])]),
    "the family where Linux has it": Fill([GOOD, Entry(b"x", struct.pack("<H", 2) + FIRST[2:])]),
    "an address of nothing": Fill([GOOD, Entry(b"x", bytes(16))]),
}


@pytest.mark.parametrize("fill", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_an_impossible_answer_drops_the_batch_and_ends_the_private_call(
    scripted_darwin: Make, caplog: pytest.LogCaptureFixture, fill: Fill
) -> None:
    for _ in range(2):
        io, calls = scripted_darwin(
            recvmsg_x=[fill], recvfrom=[Entry(b"after", SECOND), EMPTY, EMPTY], options={"max_batch": 4}
        )
        batch = io.make_batch()
        assert io.recv(batch) == 1, "the plain call follows at once"
        assert batch.take_all() == [b"after"] and batch.peer(0) == make_peer("10.0.0.2", 4002, flavour="darwin")
        assert io.stats.rx_dropped == len(fill.entries)
        assert io.recv(batch) == 0
        assert calls.calls == ["recvmsg_x", *["recvfrom"] * 3]
        assert io.caps.backend == "portable"
    assert len(lines(caplog, "recvmsg_x")) == 1


IMPOSSIBLE6 = {
    "an address of the other family": Fill([Entry(b"x", FIRST)]),
    "a length byte that is off": Fill([Entry(b"x", b"\x10" + LONG[1:])]),
    "the family of Linux": Fill([Entry(b"x", LONG[:1] + b"\x0a" + LONG[2:])]),
    "no room for the address": Fill([Entry(b"x", LONG, namelen=16)]),
}


@pytest.mark.parametrize("fill", IMPOSSIBLE6.values(), ids=IMPOSSIBLE6)
def test_an_impossible_answer_of_an_ipv6_socket(scripted_darwin: Make, fill: Fill) -> None:
    io, _ = scripted_darwin(family=socket.AF_INET6, recvmsg_x=[fill], recvfrom=[EMPTY])
    assert io.recv(io.make_batch()) == 0
    assert io.stats.rx_dropped == 1
    assert set(io.fallbacks) == {"recvmsg_x"}


def test_addresses_are_checked_even_if_nobody_asks_for_them(scripted_darwin: Make) -> None:
    io, _ = scripted_darwin(recvmsg_x=[Fill([GOOD, Entry(b"x", LONG)])], recvfrom=[EMPTY], options={"peers": False})
    assert io.recv(io.make_batch()) == 0
    assert io.stats.rx_dropped == 2


def test_without_peers_a_batch_has_none(scripted_darwin: Make) -> None:
    io, _ = scripted_darwin(recvmsg_x=[Fill([GOOD, GOOD])], options={"peers": False})
    batch = io.make_batch()
    assert io.recv(batch) == 2
    assert batch.peers == [] and batch.peer(0) is None


@pytest.mark.parametrize("error", [*REFUSALS, errno.EINVAL], ids=errno.errorcode.get)
def test_a_refused_recvmsg_x_receives_plainly_and_for_good(
    scripted_darwin: Make, caplog: pytest.LogCaptureFixture, error: int
) -> None:
    for _ in range(2):
        io, calls = scripted_darwin(
            recvmsg_x=[Fail(error)],
            recvfrom=[Entry(b"one", FIRST), Entry(b"two", SECOND), EMPTY, Entry(b"3", FIRST), EMPTY],
        )
        batch = io.make_batch()
        assert io.recv(batch) == 2
        assert batch.take_all() == [b"one", b"two"]
        assert [peer.port for peer in batch.peers if peer] == [4001, 4002]
        assert io.recv(batch) == 1
        assert batch.uniform is batch.peer(0)
        assert calls.calls == ["recvmsg_x", *["recvfrom"] * 5]
    found = lines(caplog, "recvmsg_x")
    assert len(found) == 1 and errno.errorcode[error] in found[0]


def test_the_plain_path_drops_what_is_empty_or_cut_and_stops_at_the_capacity(scripted_darwin: Make) -> None:
    script = [Entry(b"", FIRST), Entry(b"x" * 101, FIRST), *[Entry(bytes([i + 1]), FIRST) for i in range(4)]]
    io, _ = scripted_darwin(
        missing=("recvmsg_x",), recvfrom=[*script, EMPTY], options={"max_packet": 100, "max_batch": 3}
    )
    batch = io.make_batch()
    assert (io.recv(batch), batch.dropped) == (1, 2)
    assert io.recv(batch) == 3
    assert batch.take_all() == [b"\x02", b"\x03", b"\x04"]
    assert io.recv(batch) == 0


def test_the_plain_path_knows_no_sender_of_another_family(scripted_darwin: Make) -> None:
    io, _ = scripted_darwin(missing=("recvmsg_x",), recvfrom=[Entry(b"x", LONG), Entry(b"y", FIRST), EMPTY])
    batch = io.make_batch()
    assert io.recv(batch) == 2
    assert batch.peer(0) is None and batch.peer(1) == make_peer("10.0.0.1", 4001, flavour="darwin")
    assert batch.uniform is None


def test_an_error_after_a_packet_is_kept_for_the_next_receive(scripted_darwin: Make) -> None:
    io, _ = scripted_darwin(missing=("recvmsg_x",), recvfrom=[Entry(b"1", FIRST), Entry(b"2", FIRST), Fail(errno.EIO)])
    batch = io.make_batch()
    assert io.recv(batch) == 2
    with pytest.raises(IOBroken) as caught:
        io.recv(batch)
    assert caught.value.errno == errno.EIO


def test_an_interrupted_receive_is_repeated_and_a_passing_error_does_not_end_it(scripted_darwin: Make) -> None:
    io, _ = scripted_darwin(recvmsg_x=[Fail(errno.EINTR), Fail(errno.ECONNREFUSED), Fill([GOOD])])
    assert io.recv(io.make_batch()) == 1


@pytest.mark.parametrize("error", [errno.EBADF, errno.EFAULT, errno.ENOTSOCK], ids=errno.errorcode.get)
def test_an_unusable_socket_ends_the_reader(scripted_darwin: Make, error: int) -> None:
    io, _ = scripted_darwin(recvmsg_x=[Fail(error)])
    with pytest.raises(IOBroken) as caught:
        io.recv(io.make_batch())
    assert caught.value.errno == error


def test_no_datagrams_and_no_error_is_nothing(scripted_darwin: Make) -> None:
    io, _ = scripted_darwin(recvmsg_x=[0])
    assert io.recv(io.make_batch()) == 0


# -- IPv6 (C14) -------------------------------------------------------------------------------------------------------


def test_a_link_local_sender_gets_the_zone_of_the_socket(scripted_darwin: Make) -> None:
    wide = darwin_name(("2001:db8::1", 4004, 0, 0))
    io, _ = scripted_darwin(
        family=socket.AF_INET6, recvmsg_x=[Fill([Entry(b"a", LONG), Entry(b"b", wide), Entry(b"c", LONG)])]
    )
    io._scope = 7  # as of a socket that is bound to fe80::...%7
    batch = io.make_batch()
    assert io.recv(batch) == 3
    assert batch.peer(0) == make_peer("fe80::1", 4003, scope=7, flavour="darwin")
    assert batch.peer(0) is batch.peer(2)
    assert batch.peer(1) == make_peer("2001:db8::1", 4004, flavour="darwin")


def test_without_a_zone_of_its_own_the_socket_invents_none(scripted_darwin: Make) -> None:
    io, _ = scripted_darwin(family=socket.AF_INET6, recvmsg_x=[Fill([Entry(b"a", LONG)])])
    batch = io.make_batch()
    assert io.recv(batch) == 1
    peer = batch.peer(0)
    assert isinstance(peer, Peer) and peer.scope == 0


# -- descriptors (R9) -----------------------------------------------------------------------------------------------


def test_only_used_descriptors_are_restored(scripted_darwin: Make) -> None:
    io, _ = scripted_darwin(recvmsg_x=[EMPTY, Fill([GOOD] * 5), Fill([GOOD] * 2), EMPTY, EMPTY])
    batch = io.make_batch()
    io.recv(batch)
    headers = io._rx
    assert headers is not None
    padding = [2 * STEP * i + H_NAMELEN + 1 for i in range(64)]  # which no kernel looks at

    def spoilt_after(receive_again: bool) -> list[int]:
        """Put a sentinel into every header, receive, and see where it is still."""
        for at in padding:
            headers.halves[at] = 0x5A5A5A5A
        if receive_again:
            io.recv(batch)
        return [i for i, at in enumerate(padding) if headers.halves[at] == 0x5A5A5A5A]

    assert spoilt_after(True) == list(range(64))  # the call before found nothing, so there was nothing to restore
    assert headers.used == 5
    assert spoilt_after(True) == list(range(5, 64))
    assert headers.used == 2
    assert spoilt_after(True) == list(range(2, 64))
    assert headers.used == 0
    assert spoilt_after(True) == list(range(64))


def test_descriptors_are_restored_after_a_call_that_raised(scripted_darwin: Make) -> None:
    class Stop(Exception):
        pass

    io, _ = scripted_darwin(recvmsg_x=[EMPTY, EMPTY])
    batch = io.make_batch()
    io.recv(batch)
    original, headers = io._recvmsg_x, io._rx
    assert headers is not None
    fresh = bytes(headers.words)

    def spoil(fd: int, address: int, count: int, flags: int) -> int:
        for at in range(STEP * count):
            headers.words[at] = 0xDDDD
        raise Stop

    io._recvmsg_x = spoil
    with pytest.raises(Stop):
        io.recv(batch)
    io._recvmsg_x = original
    assert io.recv(batch) == 0
    assert bytes(headers.words) == fresh


def test_a_failed_copy_restores_all(scripted_darwin: Make) -> None:
    io, _ = scripted_darwin(recvmsg_x=[Fail(errno.ENOMEM), EMPTY])
    batch = io.make_batch()
    seen: list[int] = []
    original = io._recvmsg_x
    assert original is not None

    def call(fd: int, address: int, count: int, flags: int) -> int:
        result = original(fd, address, count, flags)
        headers = io._rx
        assert headers is not None
        if not seen:
            for at in range(STEP * count):
                headers.words[at] = 0xDDDD
        seen.append(count)
        return result

    io._recvmsg_x = call
    assert io.recv(batch) == 0  # what was spoilt is as at first, or the stand-in would have noticed
    assert seen == [64, 64]


def test_another_batch_gets_descriptors_of_its_own(scripted_darwin: Make) -> None:
    io, _ = scripted_darwin(recvmsg_x=[Fill([GOOD]), Fill([Entry(b"other", FIRST)]), Fill([Entry(b"again", FIRST)])])
    one, two = io.make_batch(), RxBatch(3, 300)
    assert io.recv(one) == io.recv(two) == 1
    assert (one.take(0), two.take(0)) == (b"good", b"other")
    assert io.recv(one) == 1
    assert (one.take(0), two.take(0)) == (b"again", b"other")


def test_the_real_calls_are_looked_for_only_on_macos() -> None:
    real = Libsystem()
    if not Libsystem.usable():
        assert real.recvmsg_x is None and real.sendmsg_x is None


def test_a_log_line_is_a_warning(scripted_darwin: Make, caplog: pytest.LogCaptureFixture) -> None:
    scripted_darwin(missing=("recvmsg_x",))
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_macos_gets_this_back_end_unless_another_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, stack: ExitStack
) -> None:
    monkeypatch.setattr(backend, "_here", lambda: "darwin")
    for asked, chosen, bound in (("", "darwin-msgx", 64), ("darwin", "darwin-msgx", 64), ("portable", "portable", 32)):
        monkeypatch.setenv("RNSFAST_OSIO", asked)
        calls = None if chosen == "portable" else Kernel()
        io = backend.open_backend(Kind.DATAGRAM, socket.socket(socket.AF_INET, socket.SOCK_DGRAM), sys=calls)
        stack.callback(io.close)
        assert (io.caps.backend, io.caps.max_rx) == (chosen, bound)
        assert backend.bounds(Kind.DATAGRAM) == (bound, 1, 128)
