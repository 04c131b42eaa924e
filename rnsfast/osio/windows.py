"""The calls behind the back ends for Windows: Winsock, Registered I/O, events, Wintun.  Protocol 09, sections 3 and 10.

Nothing here is looked up before the first object is made, so the module can be imported everywhere. What cannot block
goes through handles that keep the GIL, what can block through handles that let go of it. 64-bit systems only: there is
one calling convention there, and a pointer is 8 bytes.

Not verified on Windows beyond what `tests/osio/test_native_windows.py` says when it is run there.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

from rnsfast.osio.layouts_windows import (
    INFINITE,
    IPPROTO_UDP,
    LOAD_LIBRARY_SEARCH,
    SIO_GET_MULTIPLE_EXTENSION_FUNCTION_POINTER,
    SIO_UDP_CONNRESET,
    SIO_UDP_NETRESET,
    SOCK_DGRAM,
    WAIT_FAILED,
    WAIT_TIMEOUT,
    WSA_FLAG_NO_HANDLE_INHERIT,
    WSA_FLAG_REGISTERED_IO,
    WSAID_MULTIPLE_RIO,
    Guid,
    RioFunctionTable,
)

# Types of calls: result, arguments. Pointers, handles and sockets are u64.
I32, U32, U64 = ctypes.c_int32, ctypes.c_uint32, ctypes.c_uint64
Prototype = tuple[Any, tuple[Any, ...]]

_TRANSFER: Final[Prototype] = (I32, (U64, U64, U32, U64, U64, U64, U64, U32, U64))
RIO: Final[Mapping[str, Prototype]] = {
    "receive_ex": _TRANSFER,
    "send_ex": _TRANSFER,
    "close_completion_queue": (None, (U64,)),
    "create_completion_queue": (U64, (U32, U64)),
    "create_request_queue": (U64, (U64, U32, U32, U32, U32, U64, U64, U64)),
    "dequeue_completion": (U32, (U64, U64, U32)),
    "deregister_buffer": (None, (U64,)),
    "notify": (I32, (U64,)),
    "register_buffer": (U64, (U64, U32)),
}
KERNEL: Final[Mapping[str, Prototype]] = {
    "CreateEventW": (U64, (U64, I32, I32, U64)),
    "SetEvent": (I32, (U64,)),
    "CloseHandle": (I32, (U64,)),
    "WaitForMultipleObjects": (U32, (U32, U64, I32, U32)),
}
WINSOCK: Final[Mapping[str, Prototype]] = {
    "WSASocketW": (U64, (I32, I32, I32, U64, U32, U32)),
    "WSAIoctl": (I32, (U64, U32, U64, U32, U64, U32, U64, U64, U64)),
    "closesocket": (I32, (U64,)),
}
WINTUN: Final[Mapping[str, Prototype]] = {
    "WintunCreateAdapter": (U64, (ctypes.c_wchar_p, ctypes.c_wchar_p, U64)),
    "WintunCloseAdapter": (None, (U64,)),
    "WintunGetAdapterLUID": (None, (U64, U64)),
    "WintunStartSession": (U64, (U64, U32)),
    "WintunEndSession": (None, (U64,)),
    "WintunGetReadWaitEvent": (U64, (U64,)),
    "WintunReceivePacket": (U64, (U64, U64)),
    "WintunReleaseReceivePacket": (None, (U64, U64)),
    "WintunAllocateSendPacket": (U64, (U64, U32)),
    "WintunSendPacket": (None, (U64, U64)),
}

INVALID_SOCKET: Final = 0xFFFFFFFFFFFFFFFF
Function = Callable[..., int]


def usable() -> bool:
    """Whether this is a 64-bit Windows."""
    return sys.platform == "win32" and ctypes.sizeof(ctypes.c_void_p) == 8


def bind(library: Any, names: Mapping[str, Prototype]) -> dict[str, Function]:
    """Exported functions with their types. OSError if one is not there."""
    found: dict[str, Function] = {}
    for name, (result, arguments) in names.items():
        try:
            function = getattr(library, name)
        except AttributeError as error:
            raise OSError(errno.ENOSYS, f"{name} is missing") from error
        function.restype, function.argtypes = result, arguments
        found[name] = function
    return found


def bind_table(library: Any, table: RioFunctionTable) -> dict[str, Function]:
    """The functions of Registered I/O, called in the way of `library`. OSError if one is not there."""
    found: dict[str, Function] = {}
    for name, (result, arguments) in RIO.items():
        address = getattr(table, name)
        if not address:
            raise OSError(errno.ENOSYS, f"Registered I/O has no {name}")
        function = library._FuncPtr(address)  # the type of its functions, with the handling of errors and of the GIL
        function.restype, function.argtypes = result, arguments
        found[name] = function
    return found


#: Where ctypes keeps the error of the last call of this thread.
_last_error: Final[Callable[[], int]] = getattr(ctypes, "get_last_error", ctypes.get_errno)


def _libraries(name: str, mode: int = 0) -> tuple[Any, Any]:
    """A library by a handle that keeps the GIL, and by one that lets go of it."""
    if not usable():
        raise OSError(errno.ENOSYS, "this is no 64-bit Windows")
    options: dict[str, Any] = {"use_last_error": True}
    if mode:
        options["winmode"] = mode
    return ctypes.PyDLL(name, **options), ctypes.CDLL(name, **options)


class Events:
    """Event objects of the kernel."""

    def __init__(self) -> None:
        quick, patient = _libraries("kernel32")
        functions = bind(quick, {name: KERNEL[name] for name in ("CreateEventW", "SetEvent", "CloseHandle")})
        self._create, self._set, self._close = functions.values()
        self._wait = bind(patient, {"WaitForMultipleObjects": KERNEL["WaitForMultipleObjects"]})[
            "WaitForMultipleObjects"
        ]
        self.get_last_error = _last_error

    def create_event(self, manual: bool) -> int:
        handle = self._create(0, int(manual), 0, 0)
        if not handle:
            raise OSError(self.get_last_error(), "CreateEventW")
        return handle

    def set_event(self, handle: int) -> None:
        self._set(handle)

    def close_handle(self, handle: int) -> None:
        self._close(handle)

    def wait_any(self, handles: tuple[int, ...], milliseconds: int | None) -> int:
        array = (U64 * len(handles))(*handles)
        limit = INFINITE if milliseconds is None else min(milliseconds, INFINITE - 1)
        found = self._wait(len(handles), ctypes.addressof(array), 0, limit)
        if found == WAIT_TIMEOUT:
            return -1
        if found == WAIT_FAILED or found >= len(handles):
            raise OSError(self.get_last_error(), "WaitForMultipleObjects")
        return found


class RioWindows(Events):
    """Registered I/O. See `rio_queues.RioSys`."""

    receive_ex: Function
    send_ex: Function
    dequeue: Function
    notify: Function
    register_buffer: Function
    deregister_buffer: Callable[[int], None]
    create_completion_queue: Function
    close_completion_queue: Callable[[int], None]
    create_request_queue: Function

    def __init__(self) -> None:
        super().__init__()
        self._quick, patient = _libraries("ws2_32")
        functions = bind(patient, WINSOCK)
        self._socket, self._ioctl, self._closesocket = functions.values()
        self._loaded = False

    def open_socket(self, family: int) -> socket.socket:
        flags = WSA_FLAG_REGISTERED_IO | WSA_FLAG_NO_HANDLE_INHERIT
        number = self._socket(family, SOCK_DGRAM, IPPROTO_UDP, 0, 0, flags)
        if number == INVALID_SOCKET:
            raise OSError(self.get_last_error(), "WSASocketW")
        try:
            return socket.socket(family, SOCK_DGRAM, IPPROTO_UDP, fileno=number)
        except OSError:
            self._closesocket(number)
            raise

    def load(self, sock: int) -> None:
        if not self._loaded:
            self._use(bind_table(self._quick, self._table(sock)))
            self._loaded = True

    def _use(self, functions: Mapping[str, Function]) -> None:
        """The functions themselves become the methods: a call of our own between would cost as much as they do."""
        for name, function in functions.items():
            setattr(self, "dequeue" if name == "dequeue_completion" else name, function)

    def _table(self, sock: int) -> RioFunctionTable:
        guid = Guid.from_buffer_copy(WSAID_MULTIPLE_RIO)
        table = RioFunctionTable(cb_size=ctypes.sizeof(RioFunctionTable))
        self._control(
            sock,
            SIO_GET_MULTIPLE_EXTENSION_FUNCTION_POINTER,
            (ctypes.addressof(guid), ctypes.sizeof(guid)),
            (ctypes.addressof(table), ctypes.sizeof(table)),
        )
        return table

    def _control(self, sock: int, code: int, given: tuple[int, int], room: tuple[int, int] = (0, 0)) -> None:
        returned = U32()
        if self._ioctl(sock, code, *given, *room, ctypes.addressof(returned), 0, 0):
            raise OSError(self.get_last_error(), f"WSAIoctl {code:#x}")

    def ignore_unreachable(self, sock: int) -> None:
        no = U32(0)
        for code in (SIO_UDP_CONNRESET, SIO_UDP_NETRESET):
            # Where it is refused, some receives end with WSAECONNRESET, and their slots are posted again.
            with contextlib.suppress(OSError):
                self._control(sock, code, (ctypes.addressof(no), ctypes.sizeof(no)))

    def allocate(self, size: int) -> mmap.mmap:
        return mmap.mmap(-1, size)


class WintunWindows(Events):
    """Wintun. See `wintun.WintunSys`.

    Its library is the one RNSFAST_WINTUN names by an absolute path, or `wintun.dll` in the folder of the application
    or in System32; nothing else is searched. OSError if there is none.
    """

    def __init__(self) -> None:
        super().__init__()
        path = wintun_path(os.environ.get("RNSFAST_WINTUN", ""))
        quick, patient = _libraries(path, LOAD_LIBRARY_SEARCH if path == WINTUN_DLL else 0)
        slow = {"WintunCreateAdapter", "WintunCloseAdapter", "WintunStartSession", "WintunEndSession"}
        calls = bind(patient, {name: kind for name, kind in WINTUN.items() if name in slow})
        calls |= bind(quick, {name: kind for name, kind in WINTUN.items() if name not in slow})
        self._calls = calls
        self._size = U32()
        self._size_at = ctypes.addressof(self._size)
        self._receive = calls["WintunReceivePacket"]
        self.release: Callable[[int, int], object] = calls["WintunReleaseReceivePacket"]
        self.allocate_packet: Function = calls["WintunAllocateSendPacket"]
        self.send_packet: Callable[[int, int], object] = calls["WintunSendPacket"]

    def create_adapter(self, name: str) -> int:
        return self._calls["WintunCreateAdapter"](name, "rnsfast", 0)

    def close_adapter(self, adapter: int) -> None:
        self._calls["WintunCloseAdapter"](adapter)

    def start_session(self, adapter: int, capacity: int) -> int:
        return self._calls["WintunStartSession"](adapter, capacity)

    def end_session(self, session: int) -> None:
        self._calls["WintunEndSession"](session)

    def read_event(self, session: int) -> int:
        return self._calls["WintunGetReadWaitEvent"](session)

    def receive(self, session: int) -> tuple[int, int]:
        address = self._receive(session, self._size_at)
        return address, self._size.value


WINTUN_DLL: Final = "wintun.dll"


def wintun_path(wanted: str) -> str:
    """The library to load. OSError if the path in RNSFAST_WINTUN is not absolute: it would depend on the folder."""
    if not wanted:
        return WINTUN_DLL
    if not os.path.isabs(wanted):
        raise OSError(errno.EINVAL, f"RNSFAST_WINTUN is {wanted!r}, which is no absolute path")
    return wanted
