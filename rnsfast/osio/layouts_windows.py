"""What stands where in the memory that Windows reads and writes.  Protocol 09, section 10.

Declared with fixed widths, so that every system can check it: a 64-bit pointer is 8 bytes here, whoever asks. The back
ends take their indices from these structures and from nowhere else.
"""

from __future__ import annotations

import ctypes
from typing import Final

u8, u16, u32, u64, i32 = ctypes.c_uint8, ctypes.c_uint16, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int32
ptr = u64  # pointers, handles and sockets


class Guid(ctypes.Structure):
    _fields_ = (("data1", u32), ("data2", u16), ("data3", u16), ("data4", u8 * 8))


class RioFunctionTable(ctypes.Structure):
    """RIO_EXTENSION_FUNCTION_TABLE: where the functions of Registered I/O are."""

    _fields_ = (
        ("cb_size", u32),
        ("pad", u32),
        ("receive", ptr),
        ("receive_ex", ptr),
        ("send", ptr),
        ("send_ex", ptr),
        ("close_completion_queue", ptr),
        ("create_completion_queue", ptr),
        ("create_request_queue", ptr),
        ("dequeue_completion", ptr),
        ("deregister_buffer", ptr),
        ("notify", ptr),
        ("register_buffer", ptr),
        ("resize_completion_queue", ptr),
        ("resize_request_queue", ptr),
    )


class RioBuf(ctypes.Structure):
    """A piece of registered memory."""

    _fields_ = (("buffer_id", ptr), ("offset", u32), ("length", u32))


class RioResult(ctypes.Structure):
    """One completion."""

    _fields_ = (("status", i32), ("transferred", u32), ("socket_context", u64), ("request_context", u64))


class RioNotification(ctypes.Structure):
    """RIO_NOTIFICATION_COMPLETION with the event in its union."""

    _fields_ = (
        ("type", i32),
        ("pad", u32),
        ("handle", ptr),
        ("notify_reset", i32),
        ("pad2", u32),
        ("overlapped", ptr),  # only of the variant for completion ports, whose key stands where notify_reset does
    )


class SockaddrIn(ctypes.Structure):
    _fields_ = (("family", u16), ("port", u16), ("address", u8 * 4), ("zero", u8 * 8))  # the port is big-endian


class SockaddrInet(ctypes.Structure):
    """SOCKADDR_INET, as `sockaddr_in6`; `sockaddr_in` is its first 16 bytes."""

    _fields_ = (("family", u16), ("port", u16), ("flowinfo", u32), ("address", u8 * 16), ("scope_id", u32))


class WsaBuf(ctypes.Structure):
    _fields_ = (("len", u32), ("pad", u32), ("buf", ptr))


class WsaMsg(ctypes.Structure):
    _fields_ = (
        ("name", ptr),
        ("namelen", i32),
        ("pad", u32),
        ("buffers", ptr),
        ("buffer_count", u32),
        ("pad2", u32),
        ("control", WsaBuf),
        ("flags", u32),
        ("pad3", u32),
    )


class WsaCmsgHdr(ctypes.Structure):
    _fields_ = (("cmsg_len", u64), ("cmsg_level", i32), ("cmsg_type", i32))


AF_INET: Final = 2
AF_INET6: Final = 23
SOCK_DGRAM: Final = 2
IPPROTO_UDP: Final = 17

# Winsock
WSA_FLAG_NO_HANDLE_INHERIT: Final = 0x80
WSA_FLAG_REGISTERED_IO: Final = 0x100
SIO_GET_EXTENSION_FUNCTION_POINTER: Final = 0xC8000006
SIO_GET_MULTIPLE_EXTENSION_FUNCTION_POINTER: Final = 0xC8000024
SIO_UDP_CONNRESET: Final = 0x9800000C
SIO_UDP_NETRESET: Final = 0x9800000F
UDP_SEND_MSG_SIZE: Final = 2
UDP_COALESCED_INFO: Final = 3

WSAEBADF: Final = 10009
WSAEFAULT: Final = 10014
WSAEINVAL: Final = 10022
WSAEWOULDBLOCK: Final = 10035
WSAEALREADY: Final = 10037
WSAENOTSOCK: Final = 10038
WSAEMSGSIZE: Final = 10040
WSAECONNRESET: Final = 10054
WSAENOBUFS: Final = 10055

WSAID_MULTIPLE_RIO: Final = Guid(0x8509E081, 0x96DD, 0x4005, (u8 * 8)(0xB1, 0x65, 0x9E, 0x2E, 0xE8, 0xC7, 0x9E, 0x3F))
WSAID_WSARECVMSG: Final = Guid(0xF689D7C8, 0x6F1F, 0x436B, (u8 * 8)(0x8A, 0x53, 0xE5, 0x4F, 0xE3, 0x51, 0xC3, 0x22))

# Registered I/O
RIO_MSG_DONT_NOTIFY: Final = 1
RIO_MSG_DEFER: Final = 2
RIO_MSG_WAITALL: Final = 4
RIO_MSG_COMMIT_ONLY: Final = 8
RIO_EVENT_COMPLETION: Final = 1
RIO_IOCP_COMPLETION: Final = 2
RIO_CORRUPT_CQ: Final = 0xFFFFFFFF
RIO_INVALID_BUFFERID: Final = 0xFFFFFFFF

# Waiting
INFINITE: Final = 0xFFFFFFFF
WAIT_TIMEOUT: Final = 0x102
WAIT_FAILED: Final = 0xFFFFFFFF

# Wintun
ERROR_INVALID_DATA: Final = 13
ERROR_HANDLE_EOF: Final = 38
ERROR_BUFFER_OVERFLOW: Final = 111
ERROR_NO_MORE_ITEMS: Final = 259
WINTUN_CAPACITY: Final = 0x800000  # bytes of a session's ring; a power of two, 0x20000..0x4000000
WINTUN_MAX_PACKET: Final = 0xFFFF
LOAD_LIBRARY_SEARCH: Final = 0xA00  # the application's folder and System32, nothing else
