"""Wintun: draining, releasing, full rings, the end of a session, the adapter's settings.  Protocol 09, 10.3, A1, A2."""

from __future__ import annotations

import errno
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from rnsfast.osio.contract import IOBroken, IOClosed, Kind, RxBatch, TxState
from rnsfast.osio.device import DeviceError
from rnsfast.osio.wintun import WintunIO
from rnsfast.osio.wintun_device import MTU, WintunDevice, open_wintun
from tests.osio.fake_wintun import BUFFER_OVERFLOW, HANDLE_EOF, INVALID_DATA, FakeWintun

JOIN = 5.0  # seconds a thread of a test may take


def packets(count: int, size: int = 40, version: int = 4) -> list[bytes]:
    return [bytes([version << 4, i % 256]) * (size // 2) for i in range(count)]


@pytest.fixture
def tun() -> FakeWintun:
    return FakeWintun()


@contextmanager
def opened(tun: FakeWintun, **options: Any) -> Iterator[WintunIO]:
    io = WintunIO("test", sys=tun, **options)
    try:
        yield io
    finally:
        io.close()
    assert not tun.events, "events were left open"
    assert tun.log[-2:] == ["end session", "close adapter"]
    assert tun.released == tun.received


# -- receiving -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3])
def test_what_is_there_is_taken_and_released_without_a_wait(tun: FakeWintun, count: int) -> None:
    with opened(tun) as io:
        items = packets(count)
        tun.arrive(*items)
        batch = io.make_batch()
        assert io.recv(batch, timeout=None) == count
        assert batch.take_all() == items
        assert (tun.released, tun.out, tun.waits) == (count, {}, [])
        assert io.recv(batch) == 0


def test_a_batch_is_bounded_by_32_and_by_the_callers_room(tun: FakeWintun) -> None:
    with opened(tun) as io:
        assert (io.caps.kind, io.caps.max_rx, io.caps.backend) == (Kind.TUN, 32, "win-wintun")
        tun.arrive(*packets(40))
        batch = io.make_batch()
        assert [io.recv(batch), io.recv(batch), io.recv(batch)] == [32, 8, 0]
        tun.arrive(*packets(5))
        small = RxBatch(2, 0)
        assert [io.recv(small) for _ in range(4)] == [2, 2, 1, 0]


@pytest.mark.parametrize("bound", [1, 64])
def test_the_bound_can_be_set(tun: FakeWintun, bound: int) -> None:
    with opened(tun, max_batch=bound) as io:
        tun.arrive(*packets(70))
        assert io.recv(io.make_batch()) == bound


@pytest.mark.parametrize("bound", [0, 65])
def test_a_bound_out_of_range_is_refused(tun: FakeWintun, bound: int) -> None:
    with pytest.raises(ValueError, match=r"within 1\.\.64"):
        WintunIO("test", max_batch=bound, sys=tun)


def test_the_first_packet_is_waited_for_and_no_other(tun: FakeWintun) -> None:
    with opened(tun) as io:
        tun.before_wait.append(lambda: tun.arrive(*packets(2)))
        assert io.recv(io.make_batch(), timeout=None) == 2
        assert len(tun.waits) == 1
        tun.before_wait = [lambda: tun.set_event(tun.event), io.wake]  # a signal with nothing behind it, then a wake
        assert io.recv(io.make_batch(), timeout=None) == 0
        assert len(tun.waits) == 3


def test_batches_say_which_version_all_packets_have(tun: FakeWintun) -> None:
    with opened(tun) as io:
        batch = io.make_batch()
        for versions, uniform in [((4, 4), 4), ((6, 6), 6), ((4, 6), None), ((5,), None)]:
            tun.arrive(*(packets(1, version=version)[0] for version in versions))
            assert io.recv(batch) == len(versions)
            assert batch.uniform == uniform


def test_a_packet_above_the_slot_is_released_and_counted(tun: FakeWintun) -> None:
    with opened(tun, max_packet=100) as io:
        good = packets(2, size=100)
        tun.arrive(good[0], b"\x45" * 101, good[1])
        batch = io.make_batch()
        assert io.recv(batch) == 2
        assert (batch.take_all(), batch.dropped, io.stats.rx_dropped) == (good, 1, 1)
        assert (io.stats.rx_packets, io.stats.rx_bytes, tun.released) == (2, 200, 3)
        tun.arrive(b"\x45" * 101)
        assert io.recv(batch) == 0


@pytest.mark.parametrize(("code", "error"), [(HANDLE_EOF, IOClosed), (INVALID_DATA, IOBroken)])
@pytest.mark.parametrize("before", [0, 1, 2])
def test_the_end_of_the_session_is_told_after_what_came_before_it(
    tun: FakeWintun, code: int, error: type[OSError], before: int
) -> None:
    with opened(tun) as io:
        tun.arrive(*packets(before), code)
        batch = io.make_batch()
        if before:
            assert io.recv(batch) == before
        for _ in range(2):
            with pytest.raises(error):
                io.recv(batch, timeout=None)


def test_the_end_after_a_dropped_packet_keeps_the_count(tun: FakeWintun) -> None:
    with opened(tun, max_packet=10) as io:
        tun.arrive(b"\x45" * 11, HANDLE_EOF)
        with pytest.raises(IOClosed):
            io.recv(io.make_batch())
        assert io.stats.rx_dropped == 1


# -- sending ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 2, 32, 33])
def test_packets_go_out_in_order(tun: FakeWintun, count: int) -> None:
    with opened(tun) as io:
        items = packets(count)
        result = io.send(items)
        assert (result.state, result.taken, result.sent, result.rejected) == (TxState.DONE, count, count, ())
        assert tun.sent == items
        assert io.send(items, start=count).state is TxState.DONE
        assert io.stats.tx_packets == count


@pytest.mark.parametrize("failing", [0, 1, 4])
def test_a_full_ring_costs_the_packet_that_met_it_and_no_other(tun: FakeWintun, failing: int) -> None:
    with opened(tun) as io:
        items = packets(5)
        tun.send_errors = {failing + 1: BUFFER_OVERFLOW}
        result = io.send(items)
        assert (result.state, result.taken, result.sent) == (TxState.DONE, 5, 4)
        assert result.rejected == ((failing, errno.ENOBUFS),)
        assert tun.sent == items[:failing] + items[failing + 1 :]
        assert len(tun.allocations) == 5  # each is offered once
        assert io.stats.tx_rejected == 1


def test_a_ring_that_stays_full_costs_all_the_rest_each_by_itself() -> None:
    tun = FakeWintun(room=2)
    with opened(tun) as io:
        result = io.send(packets(5))
        assert (result.taken, result.sent, [index for index, _ in result.rejected]) == (5, 2, [2, 3, 4])
        assert io.send(packets(1)).rejected == ((0, errno.ENOBUFS),)
        assert io.wait(None, read=False, write=True) == 2


def test_a_session_that_ended_breaks_the_sender(tun: FakeWintun) -> None:
    with opened(tun) as io:
        tun.send_errors = {2: HANDLE_EOF}
        result = io.send(packets(3))
        assert (result.state, result.taken, result.sent) == (TxState.BROKEN, 1, 1)


def test_what_is_no_packet_is_never_offered(tun: FakeWintun) -> None:
    with opened(tun, max_packet=100) as io:
        good = packets(2, version=6)
        result = io.send([b"", good[0], b"\x45" * 101, b"\x10abc", good[1]])
        assert (result.sent, [index for index, _ in result.rejected], tun.sent) == (2, [0, 2, 3], good)


# -- opening and closing ---------------------------------------------------------------------------------------------


def test_a_stale_adapter_is_worth_one_more_try(tun: FakeWintun) -> None:
    tun.adapter_errors = [183]
    with opened(tun):
        assert tun.log == ["create test", "create test"]


@pytest.mark.parametrize(("code", "words"), [(5, "administrator"), (2, "error 2")])
def test_an_adapter_that_cannot_be_made_is_an_error_for_the_operator(tun: FakeWintun, code: int, words: str) -> None:
    tun.adapter_errors = [183, code]
    with pytest.raises(DeviceError, match=words):
        WintunIO("test", sys=tun)
    assert not tun.events


def test_a_session_that_cannot_be_started_gives_the_adapter_back(tun: FakeWintun) -> None:
    tun.session_error = 1450
    with pytest.raises(DeviceError, match="1450"):
        WintunIO("test", sys=tun)
    assert tun.log == ["create test", "close adapter"]
    assert not tun.events


def test_closing_ends_a_blocked_receive_and_nothing_is_used_afterwards(tun: FakeWintun) -> None:
    with opened(tun) as io:
        ended = threading.Event()

        def read() -> None:
            with pytest.raises(IOClosed):
                io.recv(io.make_batch(), timeout=None)
            ended.set()

        threads = [threading.Thread(target=read)]
        threads[0].start()
        assert tun.waiting.wait(JOIN)
        threads += [threading.Thread(target=io.close) for _ in range(2)]
        for thread in threads[1:]:
            thread.start()
        assert ended.wait(JOIN)
        for thread in threads:
            thread.join(JOIN)
            assert not thread.is_alive()
        with pytest.raises(IOClosed):
            io.recv(io.make_batch())
        assert io.send(packets(2)).state is TxState.CLOSED
        assert io.send_one(packets(1)[0]).state is TxState.CLOSED
        io.wake()
        io.close()


def test_threads_that_hammer_it_see_a_clean_end(tun: FakeWintun) -> None:
    found: list[bytes] = []
    half = threading.Event()
    with opened(tun, max_batch=4) as io:

        def read() -> None:
            batch = io.make_batch()
            while True:
                try:
                    io.recv(batch, timeout=None)
                except IOClosed:
                    return
                found.extend(batch.take_all())
                if len(found) >= 200:
                    half.set()

        def write() -> None:
            while io.send(packets(3)).state is TxState.DONE:
                pass

        threads = [threading.Thread(target=read), threading.Thread(target=write)]
        for thread in threads:
            thread.start()
        items = packets(200)
        for item in items:
            tun.arrive(item)
        assert half.wait(JOIN)
        io.close()
        for thread in threads:
            thread.join(JOIN)
            assert not thread.is_alive()
        assert found == items
        assert len(tun.sent) == io.stats.tx_packets


# -- the adapter's settings ------------------------------------------------------------------------------------------


class Netsh:
    def __init__(self) -> None:
        self.commands: list[str] = []
        self.failing = ""

    def __call__(self, arguments: Sequence[str]) -> tuple[int, str]:
        self.commands.append(" ".join(arguments))
        return (1, "Zugriff verweigert") if self.failing and self.failing in self.commands[-1] else (0, "")


@contextmanager
def device(tun: FakeWintun, run: Netsh, name: str | None = None) -> Iterator[WintunDevice]:
    found = open_wintun(name, batch=8, sys=tun, run=run)
    run.commands.clear()
    try:
        yield found
    finally:
        found.close()
    assert not tun.events


def test_settings_become_commands(tun: FakeWintun) -> None:
    run = Netsh()
    with device(tun, run, "my net") as found:
        assert (found.name, found.mtu, found.io.caps.max_rx) == ("my net", MTU, 8)
        found.set_mtu(1000)
        found.set_mtu(1400)
        found.add_address("10.77.0.1/24")
        found.add_address("fd00::1/64")
        found.add_route("10.78.0.0/16")
        found.add_route("fd01::/48")
        assert found.is_up
        found.down()
        assert not found.is_up
        found.up()
        assert found.is_up
        assert found.mtu == 1400
        assert run.commands == [
            "interface ipv4 set subinterface interface=my net mtu=1000 store=active",
            "interface ipv4 set subinterface interface=my net mtu=1400 store=active",
            "interface ipv6 set subinterface interface=my net mtu=1400 store=active",
            "interface ipv4 add address name=my net address=10.77.0.1 mask=255.255.255.0 store=active",
            "interface ipv6 add address interface=my net address=fd00::1/64 store=active",
            "interface ipv4 add route prefix=10.78.0.0/16 interface=my net store=active",
            "interface ipv6 add route prefix=fd01::/48 interface=my net store=active",
            "interface set interface name=my net admin=disabled",
            "interface set interface name=my net admin=enabled",
        ]


def test_what_is_there_already_is_not_added_again(tun: FakeWintun) -> None:
    run = Netsh()
    with device(tun, run) as found:
        for _ in range(2):
            found.add_address("10.77.0.1/24")
            found.add_route("10.78.0.0/16")
        assert len(run.commands) == 2


def test_a_refused_setting_is_an_error_with_its_text(tun: FakeWintun) -> None:
    run = Netsh()
    with device(tun, run) as found:
        run.failing = "add address"
        with pytest.raises(DeviceError, match="Zugriff verweigert"):
            found.add_address("10.77.0.1/24")
        run.failing = ""
        found.add_address("10.77.0.1/24")
        assert len(run.commands) == 2


@pytest.mark.parametrize("wrong", ["10.0.0.300/8", "", "x"])
def test_addresses_and_routes_are_checked_before_a_command_is_run(tun: FakeWintun, wrong: str) -> None:
    run = Netsh()
    with device(tun, run) as found:
        with pytest.raises(DeviceError):
            found.add_address(wrong)
        with pytest.raises(DeviceError):
            found.add_route(wrong)
        assert not run.commands


def test_a_device_that_cannot_be_set_up_is_closed(tun: FakeWintun) -> None:
    run = Netsh()
    run.failing = "mtu"
    with pytest.raises(DeviceError):
        open_wintun(None, sys=tun, run=run)
    assert tun.log[-1] == "close adapter"
    assert not tun.events


@pytest.mark.parametrize("name", ["", "x" * 128, 'a"b', "a\nb"])
def test_names_that_cannot_be_are_refused(tun: FakeWintun, name: str) -> None:
    with pytest.raises(DeviceError, match="name of an adapter"):
        open_wintun(name, sys=tun)


@pytest.mark.skipif(sys.platform == "win32", reason="this is Windows")
def test_elsewhere_there_is_none() -> None:
    with pytest.raises(DeviceError, match="does not exist on this system"):
        open_wintun(None)
