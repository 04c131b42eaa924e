"""What stands where in the memory that macOS reads and writes.  Protocol 09, sections 6.1 and 6.2.

Declared with fixed widths, so that every system can check it: a 64-bit pointer is 8 bytes here, whoever asks. The back
ends take their indices from these structures and from nowhere else.
"""

from __future__ import annotations

import ctypes
from typing import Final

u8, u16, u32, u64, i32 = ctypes.c_uint8, ctypes.c_uint16, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int32


class MsghdrX(ctypes.Structure):
    """One datagram of `recvmsg_x` and `sendmsg_x`. Not the `msghdr` of Linux: three fields are narrower."""

    _fields_ = (
        ("msg_name", u64),
        ("msg_namelen", u32),
        ("pad", u32),
        ("msg_iov", u64),
        ("msg_iovlen", i32),
        ("pad2", u32),
        ("msg_control", u64),
        ("msg_controllen", u32),
        ("msg_flags", i32),
        ("msg_datalen", u64),
    )


class Iovec(ctypes.Structure):
    _fields_ = (("iov_base", u64), ("iov_len", u64))


class SockaddrIn(ctypes.Structure):
    _fields_ = (
        ("sin_len", u8),  # 16
        ("sin_family", u8),  # AF_INET
        ("sin_port", u16),  # big-endian
        ("sin_addr", u8 * 4),
        ("sin_zero", u8 * 8),
    )


class SockaddrIn6(ctypes.Structure):
    _fields_ = (
        ("sin6_len", u8),  # 28
        ("sin6_family", u8),  # AF_INET6
        ("sin6_port", u16),  # big-endian
        ("sin6_flowinfo", u32),
        ("sin6_addr", u8 * 16),
        ("sin6_scope_id", u32),
    )


class CtlInfo(ctypes.Structure):
    """What CTLIOCGINFO turns from a name into a number."""

    _fields_ = (("ctl_id", u32), ("ctl_name", u8 * 96))


AF_INET: Final = 2
AF_INET6: Final = 30
PF_SYSTEM: Final = 32
SYSPROTO_CONTROL: Final = 2

MSG_DONTWAIT: Final = 0x80
MSG_TRUNC: Final = 0x10
MSG_CTRUNC: Final = 0x20

KERNEL_CLAMP: Final = 256  # datagrams a call, whatever was asked (kern.ipc.somaxrecvmsgx)

CTLIOCGINFO: Final = 0xC0644E03
UTUN_CONTROL: Final = "com.apple.net.utun_control"
UTUN_OPT_IFNAME: Final = 2
UTUN_OPT_MAX_PENDING_PACKETS: Final = 16

#: Requests about a network interface, with an `ifreq` of 32 bytes: the name in 16, then a number.
SIOCSIFFLAGS, SIOCGIFFLAGS = 0x80206910, 0xC0206911
SIOCGIFMTU, SIOCSIFMTU = 0xC0206933, 0x80206934
IFF_UP: Final = 0x1
