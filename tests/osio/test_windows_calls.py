"""The calls of Windows as far as any system can check them: prototypes, lookup, and calls through a table of pointers.

The table points at C functions that call the fake. So numbers, widths and pointers go the whole way through ctypes.
"""

from __future__ import annotations

import ctypes
import socket
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from rnsfast.osio import windows
from rnsfast.osio.contract import TxState
from rnsfast.osio.layouts_windows import RioFunctionTable
from rnsfast.osio.rio import RioDatagramIO
from rnsfast.osio.windows import RIO, RioWindows, bind, bind_table, wintun_path
from tests.osio.fake_rio import ENOBUFS, FakeRio
from tests.osio.rio_makers import ALICE, name28, packets, sent

elsewhere = pytest.mark.skipif(sys.platform == "win32", reason="this is Windows: test_native_windows runs")


class Through:
    """The fake behind a table of C functions, bound by the product."""

    def __init__(self, fake: FakeRio) -> None:
        self.fake = fake
        self.keep: list[Any] = []
        table = RioFunctionTable(cb_size=112)
        for name, (result, arguments) in RIO.items():
            method = getattr(fake, "dequeue" if name == "dequeue_completion" else name)
            callback = ctypes.CFUNCTYPE(result, *arguments)(method)
            self.keep.append(callback)
            setattr(table, name, ctypes.cast(callback, ctypes.c_void_p).value)
        RioWindows._use(self, bind_table(ctypes.PyDLL(None), table))  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.fake, name)


@elsewhere
@pytest.mark.parametrize("count", [1, 32])
def test_packets_go_both_ways_through_the_table(count: int) -> None:
    fake = FakeRio()
    through = Through(fake)
    assert all("fake" not in repr(getattr(through, name)) for name in ("send_ex", "receive_ex", "dequeue", "notify"))
    io = RioDatagramIO(fake.socket(), slots=64, sys=through)  # type: ignore[arg-type]
    items = packets(count, 2016)
    assert io.send(items, ALICE).state is TxState.DONE
    assert fake.wire == [(item, name28(ALICE)) for item in items]
    fake.before_wait.append(lambda: [fake.arrive(item, name28(ALICE)) for item in items] and None)
    batch = io.make_batch()
    assert io.recv(batch, timeout=None) == count
    assert (batch.take_all(), batch.uniform) == (items, ALICE)
    io.close()
    assert fake.log[-1] == "free"


@elsewhere
def test_errors_come_through_the_table() -> None:
    fake = FakeRio()
    io = RioDatagramIO(fake.socket(), slots=4, max_batch=4, sys=Through(fake))  # type: ignore[arg-type]
    assert fake.tx
    fake.tx.fail_posts = {2: 10022}
    assert io.send(packets(3), ALICE).rejected == ((1, 10022),)
    fake.tx.fail_commits = [ENOBUFS]
    assert io.send(packets(2), ALICE).state is TxState.UNKNOWN
    fake.tx.queue.corrupt = True
    assert io.send(packets(2), ALICE).state is TxState.BROKEN  # 0xFFFFFFFF is not read as -1
    io.close()
    assert len(sent(fake)) == 2


def test_a_table_with_a_hole_is_refused() -> None:
    with pytest.raises(OSError, match="receive_ex"):
        bind_table(ctypes.PyDLL(None), RioFunctionTable(cb_size=112))


def test_a_library_without_a_function_is_refused() -> None:
    with pytest.raises(OSError, match=r"Wintun\w+ is missing"):
        bind(SimpleNamespace(), windows.WINTUN)


@pytest.mark.parametrize("table", [windows.RIO, windows.KERNEL, windows.WINSOCK, windows.WINTUN])
def test_prototypes_use_fixed_widths_only(table: dict[str, windows.Prototype]) -> None:
    fixed = {None, ctypes.c_int32, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_wchar_p}
    for result, arguments in table.values():
        assert {result, *arguments} <= fixed


def test_every_entry_of_the_table_that_is_called_stands_in_the_layout() -> None:
    assert set(RIO) < {name for name, _ in RioFunctionTable._fields_}


@elsewhere
@pytest.mark.parametrize("kind", [windows.Events, windows.RioWindows, windows.WintunWindows])
def test_the_calls_are_looked_up_when_they_are_needed_and_refused_elsewhere(kind: type) -> None:
    with pytest.raises(OSError, match="no 64-bit Windows"):
        kind()


@pytest.mark.parametrize(("wanted", "path"), [("", "wintun.dll"), ("/opt/wintun.dll", "/opt/wintun.dll")])
def test_wintun_is_loaded_from_where_it_is_named(wanted: str, path: str) -> None:
    if wanted and sys.platform == "win32":
        wanted = path = "C:\\wintun.dll"
    assert wintun_path(wanted) == path


def test_wintun_is_never_loaded_relative_to_the_working_directory() -> None:
    with pytest.raises(OSError, match="no absolute path"):
        wintun_path("wintun.dll")


@elsewhere
def test_waiting_calls_the_kernel_with_an_array_of_handles() -> None:
    seen: list[tuple[int, list[int], int, int]] = []

    def wait(count: int, handles: int, every: int, limit: int) -> int:
        seen.append((count, list((ctypes.c_uint64 * count).from_address(handles)), every, limit))
        return answers.pop(0)

    answers = [1, 0x102, 0xFFFFFFFF]
    events = windows.Events.__new__(windows.Events)
    events._wait = wait
    events.get_last_error = lambda: 6
    assert events.wait_any((8, 1 << 40), None) == 1
    assert events.wait_any((8,), 5) == -1
    with pytest.raises(OSError, match="WaitForMultipleObjects"):
        events.wait_any((8,), 5)
    assert seen[0] == (2, [8, 1 << 40], 0, 0xFFFFFFFF)
    assert seen[1] == (1, [8], 0, 5)


@elsewhere
def test_the_table_is_asked_for_with_its_guid() -> None:
    asked: list[tuple[int, ...]] = []

    def control(sock: int, code: int, given: int, size: int, room: int, room_size: int, *rest: int) -> int:
        asked.append((sock, code, size, room_size))
        if code == 0xC8000024:
            assert ctypes.string_at(given, 4) == (0x8509E081).to_bytes(4, "little")
            ctypes.c_uint64.from_address(room + 8).value = 77
        else:
            assert ctypes.string_at(given, 4) == bytes(4)
        return -1 if code == 0x9800000F else 0

    rio = RioWindows.__new__(RioWindows)
    rio._ioctl = control
    rio.get_last_error = lambda: 10022
    assert rio._table(5).receive == 77
    rio.ignore_unreachable(5)
    assert asked == [(5, 0xC8000024, 16, 112), (5, 0x9800000C, 4, 0), (5, 0x9800000F, 4, 0)]


@elsewhere
def test_a_socket_that_python_does_not_take_is_closed() -> None:
    closed: list[int] = []
    rio = RioWindows.__new__(RioWindows)
    rio._socket = lambda *_: 0x7FFFFFF0
    rio._closesocket = lambda number: closed.append(number) or 0
    rio.get_last_error = lambda: 10044
    with pytest.raises(OSError):
        rio.open_socket(socket.AF_INET)
    assert closed == [0x7FFFFFF0]
    rio._socket = lambda *_: windows.INVALID_SOCKET
    with pytest.raises(OSError, match="WSASocketW"):
        rio.open_socket(socket.AF_INET)
