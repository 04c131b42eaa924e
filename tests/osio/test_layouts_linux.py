"""What the back ends of Linux write into memory stands where the kernel looks for it.

Three things must agree: the table of protocol 09, section 5.1, which is written out here; the C compiler of this
system, if there is one; and our code, which is watched with the offsets of the table. A table that is off by anything
must disagree with the code.
"""

from __future__ import annotations

import ctypes
import select
import shutil
import socket
import struct
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from rnsfast.osio import linux, linux_tun, runs, stream, virtio
from rnsfast.osio.linux import Libc, LinuxDatagramIO
from rnsfast.osio.peers import make_peer
from rnsfast.osio.poller import _Glance
from tests.osio.linux_fake import FakeSys

pytestmark = pytest.mark.skipif(not Libc.usable(), reason="the structures are those of 64-bit little-endian Linux")

Fields = list[tuple[str, int]]  # name and bytes, in order; each is aligned to its width, "pad" fills up
Layout = tuple[int, dict[str, tuple[int, int]]]  # bytes of the whole; offset and bytes of each field

MSGHDR: Fields = [
    ("msg_name", 8), ("msg_namelen", 4), ("msg_iov", 8), ("msg_iovlen", 8), ("msg_control", 8), ("msg_controllen", 8),
    ("msg_flags", 4),
]  # fmt: skip
MMSGHDR: Fields = [*MSGHDR, ("pad", 4), ("msg_len", 4)]

#: The literal figures; for C: the type, and the header that declares it.
TABLE: dict[str, tuple[str, Layout]] = {
    "struct iovec": ("sys/uio.h", (16, {"iov_base": (0, 8), "iov_len": (8, 8)})),
    "struct msghdr": (
        "sys/socket.h",
        (56, {"msg_name": (0, 8), "msg_namelen": (8, 4), "msg_iov": (16, 8), "msg_iovlen": (24, 8),
              "msg_control": (32, 8), "msg_controllen": (40, 8), "msg_flags": (48, 4)}),
    ),
    "struct mmsghdr": ("sys/socket.h", (64, {"msg_hdr": (0, 56), "msg_len": (56, 4)})),
    "struct cmsghdr": ("sys/socket.h", (16, {"cmsg_len": (0, 8), "cmsg_level": (8, 4), "cmsg_type": (12, 4)})),
    "struct sockaddr_in": (
        "netinet/in.h", (16, {"sin_family": (0, 2), "sin_port": (2, 2), "sin_addr": (4, 4), "sin_zero": (8, 8)}),
    ),
    "struct sockaddr_in6": (
        "netinet/in.h",
        (28, {"sin6_family": (0, 2), "sin6_port": (2, 2), "sin6_flowinfo": (4, 4), "sin6_addr": (8, 16),
              "sin6_scope_id": (24, 4)}),
    ),
    "struct virtio_net_hdr": (
        "linux/virtio_net.h",
        (10, {"flags": (0, 1), "gso_type": (1, 1), "hdr_len": (2, 2), "gso_size": (4, 2), "csum_start": (6, 2),
              "csum_offset": (8, 2)}),
    ),
    "struct ifreq": ("linux/if.h", (40, {"ifr_name": (0, 16), "ifr_flags": (16, 2), "ifr_mtu": (16, 4)})),
}  # fmt: skip

#: Constants, and what C says for them.
CONSTANTS = {
    "MSG_DONTWAIT": linux.DONTWAIT,
    "MSG_TRUNC": linux.TRUNC,
    "MSG_CTRUNC": linux.CTRUNC,
    "MSG_NOSIGNAL": linux.NOSIGNAL,
    "SOL_UDP": runs.SOL_UDP,
    "UDP_SEGMENT": runs.UDP_SEGMENT,
    "UDP_GRO": runs.UDP_GRO,
    "CMSG_SPACE(2)": runs.CONTROL,
    "CMSG_SPACE(4)": runs.CONTROL,
    "CMSG_LEN(2)": 18,
    "CMSG_LEN(4)": 20,
    "AF_INET6": 10,
    "TUNSETIFF": linux_tun.TUNSETIFF,
    "TUNSETOFFLOAD": linux_tun.TUNSETOFFLOAD,
    "IFF_TUN": linux_tun.IFF_TUN,
    "IFF_NO_PI": linux_tun.IFF_NO_PI,
    "IFF_VNET_HDR": linux_tun.IFF_VNET_HDR,
    "TUN_F_CSUM": linux_tun.OFFLOAD_CSUM,
    "TUN_F_TSO4": linux_tun.OFFLOAD_TSO4,
    "TUN_F_TSO6": linux_tun.OFFLOAD_TSO6,
    "TUN_F_TSO_ECN": linux_tun.OFFLOAD_ECN,
    "SIOCGIFTXQLEN": linux_tun.SIOCGIFTXQLEN,
    "SIOCSIFTXQLEN": linux_tun.SIOCSIFTXQLEN,
}
HEADERS = (
    "sys/socket.h", "sys/uio.h", "netinet/in.h", "netinet/udp.h", "linux/virtio_net.h", "linux/if.h", "linux/if_tun.h",
    "linux/sockios.h", "sys/ioctl.h", "sys/epoll.h", "stddef.h", "stdio.h",
)  # fmt: skip


def laid_out(fields: Fields) -> Layout:
    """As C does it: each field aligned to its width, the whole to the widest."""
    at, places = 0, {}
    for name, width in fields:
        at = (at + width - 1) // width * width
        if name != "pad":
            places[name] = (at, width)
        at += width
    widest = max(width for _, width in fields)
    return (at + widest - 1) // widest * widest, places


def mutants(fields: Fields) -> Iterator[tuple[str, Layout]]:
    """One field removed, one narrower, two exchanged."""
    for i, (name, width) in enumerate(fields):
        yield f"without {name}", laid_out(fields[:i] + fields[i + 1 :])
        if width == 8 and name != "msg_iovlen":  # where nothing moves, a small number reads the same in 4 bytes
            yield f"{name} of 4 bytes", laid_out([*fields[:i], (name, 4), *fields[i + 1 :]])
        if i and width != fields[i - 1][1]:
            yield f"{name} too early", laid_out([*fields[: i - 1], fields[i], fields[i - 1], *fields[i + 1 :]])


@pytest.fixture
def opened(stack: ExitStack) -> tuple[LinuxDatagramIO, FakeSys]:
    sys = FakeSys()
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    io = LinuxDatagramIO(sock, sys=sys, max_batch=8, coalescing=True)
    stack.callback(io.close)
    return io, sys


def read(address: int, layout: Layout, entry: int, field: str) -> int | None:
    size, places = layout
    if field not in places:
        return None
    offset, width = places[field]
    kind = {2: ctypes.c_uint16, 4: ctypes.c_uint32, 8: ctypes.c_uint64}[width]
    return int(kind.from_address(address + size * entry + offset).value)


def write(address: int, layout: Layout, entry: int, field: str, value: int) -> None:
    size, places = layout
    if field in places:
        offset, width = places[field]
        {2: ctypes.c_uint16, 4: ctypes.c_uint32, 8: ctypes.c_uint64}[width].from_address(
            address + size * entry + offset
        ).value = value


def pointer(data: bytes) -> int:
    """Where the bytes of an object stand."""
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0


# -- the table against the compiler -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """Every expression of the tables with its value in C."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler on this system")
    wanted = [f"sizeof({kind})" for kind in (*TABLE, "struct epoll_event")]
    wanted += ["offsetof(struct epoll_event, data)", *CONSTANTS]
    for kind, (_, (_, fields)) in TABLE.items():
        for field in fields:
            wanted += [f"offsetof({kind}, {field})", f"sizeof((({kind} *)0)->{field})"]
    where: Path = tmp_path_factory.mktemp("layouts")
    lines = ["#define _GNU_SOURCE", *(f"#include <{header}>" for header in HEADERS), "int main(void) {"]
    lines += [f'printf("%lld\\n", (long long)({what}));' for what in wanted]
    (where / "layouts.c").write_text("\n".join([*lines, "return 0; }", ""]))
    made = subprocess.run([compiler, "-w", "-o", "layouts", "layouts.c"], cwd=where, capture_output=True, text=True)
    if "No such file" in made.stderr:
        pytest.skip("no C headers of Linux on this system")
    assert not made.returncode, made.stderr
    printed = subprocess.run([where / "layouts"], capture_output=True, text=True, check=True).stdout
    return dict(zip(wanted, map(int, printed.split()), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("kind", TABLE)
def test_the_table_is_what_the_compiler_says(compiled: dict[str, int], kind: str) -> None:
    size, fields = TABLE[kind][1]
    found = {
        field: (compiled[f"offsetof({kind}, {field})"], compiled[f"sizeof((({kind} *)0)->{field})"]) for field in fields
    }
    assert (compiled[f"sizeof({kind})"], found) == (size, fields)


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_are_what_the_compiler_says(compiled: dict[str, int], name: str) -> None:
    assert compiled[name] == CONSTANTS[name]


def test_events_of_epoll_are_as_the_compiler_says(compiled: dict[str, int]) -> None:
    with select.epoll() as epoll:
        layout = _Glance(epoll.fileno())._layout
    assert layout.size == compiled["sizeof(struct epoll_event)"]
    raw = layout.pack(select.EPOLLIN, 77)
    assert struct.unpack_from("=I", raw) == (select.EPOLLIN,)
    assert struct.unpack_from("=i", raw, compiled["offsetof(struct epoll_event, data)"]) == (77,)


def test_the_table_follows_from_the_order_of_the_fields() -> None:
    """So that the mutants below are mutants of the table."""
    size, fields = laid_out(MMSGHDR)
    header_size, header = TABLE["struct msghdr"][1]
    assert laid_out(MSGHDR) == (header_size, header)
    assert (size, fields) == (64, {**header, "msg_len": TABLE["struct mmsghdr"][1][1]["msg_len"]})


# -- the code against the table -----------------------------------------------------------------------------------


def agrees_when_sending(io: LinuxDatagramIO, sys: FakeSys, layout: Layout) -> bool:
    """Three entries: a run, one by itself, a run; each to a peer of its own. Only numbers are looked at."""
    items = [b"a" * 300] * 2 + [b"b" * 400] + [b"c" * 500] * 3
    peers = [make_peer("127.0.0.1", port) for port in (1, 1, 2, 3, 3, 3)]
    seen: list[dict[str, int | None]] = []

    def sendmmsg(fd: int, vector: int, count: int, flags: int, /) -> int:
        assert count == 3
        seen.extend({name: read(vector, layout, entry, name) for name, _ in MSGHDR} for entry in range(count))
        return count

    sys.sendmmsg = sendmmsg  # type: ignore[method-assign]
    assert io.send(items, peers).sent == 6
    first_iovec, control = ctypes.addressof(io._tx._views[1]), io._tx.control_address
    expected = [
        {
            "msg_name": io._to[peers[at].raw][1], "msg_namelen": 16, "msg_iov": first_iovec + 16 * entry,
            "msg_iovlen": 1, "msg_control": control + 24 * entry if run else 0, "msg_controllen": 24 if run else 0,
            "msg_flags": 0,
        }
        for entry, (at, run) in enumerate([(0, True), (2, False), (3, True)])
    ]  # fmt: skip
    return seen == expected


def agrees_when_receiving(io: LinuxDatagramIO, sys: FakeSys, layout: Layout) -> bool:
    """Two datagrams and a coalesced one of two; the kernel writes lengths, and what they are of stands in the slots."""
    offered: list[dict[str, int | None]] = []

    def recvmmsg(fd: int, vector: int, count: int, flags: int, timeout: None, /) -> int:
        room = io._rx
        assert room is not None
        offered.extend({name: read(vector, layout, entry, name) for name, _ in MSGHDR} for entry in range(count))
        for entry, size in enumerate((11, 12, 26)):
            room.names[32 * entry : 32 * entry + 16] = make_peer("127.0.0.1", entry + 1).raw
            room.control[24 * entry : 24 * entry + 24] = struct.pack("=Qiii4x", 20, 17, 104, 13)
            write(vector, layout, entry, "msg_namelen", 16)
            write(vector, layout, entry, "msg_controllen", 24 if entry == 2 else 0)
            write(vector, layout, entry, "msg_flags", 0)
            write(vector, layout, entry, "msg_len", size)
        return 3

    sys.recvmmsg = recvmmsg  # type: ignore[method-assign]
    batch = io.make_batch()
    if io.recv(batch) != 4:
        return False
    room = io._rx
    assert room is not None
    iovecs = ctypes.addressof(room._views[1])
    expected = [
        {
            "msg_name": room.names_address + 32 * entry, "msg_namelen": 28, "msg_iov": iovecs + 16 * entry,
            "msg_iovlen": 1, "msg_control": room.control_address + 24 * entry, "msg_controllen": 24, "msg_flags": 0,
        }
        for entry in range(batch.slots)
    ]  # fmt: skip
    sizes = [len(batch.data(i)) for i in range(4)]
    return offered == expected and sizes == [11, 12, 13, 13] and [peer.port for peer in batch.peers] == [1, 2, 3, 3]  # type: ignore[union-attr]


def test_what_is_sent_stands_where_the_kernel_looks(opened: tuple[LinuxDatagramIO, FakeSys]) -> None:
    assert agrees_when_sending(*opened, laid_out(MMSGHDR))


def test_what_is_received_is_looked_for_where_the_kernel_writes(opened: tuple[LinuxDatagramIO, FakeSys]) -> None:
    assert agrees_when_receiving(*opened, laid_out(MMSGHDR))


@pytest.mark.parametrize("layout", [layout for _, layout in mutants(MMSGHDR)], ids=[n for n, _ in mutants(MMSGHDR)])
def test_a_layout_that_is_off_disagrees(opened: tuple[LinuxDatagramIO, FakeSys], layout: Layout) -> None:
    sending = agrees_when_sending(*opened, layout)
    try:
        receiving = agrees_when_receiving(*opened, layout)
    except (OSError, AssertionError, struct.error):  # it reads what is not there
        receiving = False
    assert not (sending and receiving)


def test_bytes_of_an_entry_are_those_of_the_packet(opened: tuple[LinuxDatagramIO, FakeSys]) -> None:
    io, sys = opened
    items = [bytes([n]) * (300 + n) for n in range(4)]
    layout = TABLE["struct iovec"][1]
    seen: list[tuple[int | None, int | None]] = []

    def sendmmsg(fd: int, vector: int, count: int, flags: int, /) -> int:
        first = read(vector, laid_out(MMSGHDR), 0, "msg_iov") or 0
        seen.extend((read(first, layout, n, "iov_base"), read(first, layout, n, "iov_len")) for n in range(count))
        return count

    sys.sendmmsg = sendmmsg  # type: ignore[method-assign]
    assert io.send(items, make_peer("127.0.0.1", 1)).sent == 4
    assert seen == [(pointer(item), len(item)) for item in items]


def test_a_gathered_stream_stands_where_the_kernel_looks() -> None:
    left, right = socket.socketpair()
    with left, right:
        calls = stream.LinuxCalls(left)
        items = [bytes([n]) * (9000 + n) for n in range(3)]
        seen: list[Any] = []

        def sendmsg(fd: int, header: int, flags: int) -> int:
            layout, vector = laid_out(MSGHDR), TABLE["struct iovec"][1]
            first = read(header, layout, 0, "msg_iov") or 0
            seen.append({name: read(header, layout, 0, name) for name, _ in MSGHDR if name != "msg_iov"})
            seen.extend((read(first, vector, n, "iov_base"), read(first, vector, n, "iov_len")) for n in range(3))
            return 1

        calls._sendmsg = sendmsg
        assert calls.gather(items) == 1
        rest = {"msg_name": 0, "msg_namelen": 0, "msg_control": 0, "msg_controllen": 0, "msg_flags": 0}
        assert seen == [{**rest, "msg_iovlen": 3}, *((pointer(item), len(item)) for item in items)]


def test_structures_that_are_packed_have_the_size_and_the_order_of_the_table() -> None:
    size, fields = TABLE["struct virtio_net_hdr"][1]
    raw = virtio.HEADER.pack(1, 2, 3, 4, 5, 6)
    assert len(raw) == size
    assert [int.from_bytes(raw[at : at + width], "little") for at, width in fields.values()] == [1, 2, 3, 4, 5, 6]
    size, fields = TABLE["struct ifreq"][1]
    for layout, field in ((linux_tun.IFREQ_FLAGS, "ifr_flags"), (linux_tun.IFREQ_NUMBER, "ifr_mtu")):
        raw = layout.pack(b"tun0", 0x1234)
        at, width = fields[field]
        assert len(raw) == size and raw[:5] == b"tun0\0"
        assert int.from_bytes(raw[at : at + width], "little") == 0x1234
    raw, (size, fields) = runs.segment_control(500), TABLE["struct cmsghdr"][1]
    assert [int.from_bytes(raw[at : at + width], "little") for at, width in fields.values()] == [18, 17, 103]
    assert int.from_bytes(raw[size : size + 2], "little") == 500


def test_addresses_have_the_order_of_the_table() -> None:
    for host, kind, family in (("192.0.2.1", "struct sockaddr_in", 2), ("fe80::1", "struct sockaddr_in6", 10)):
        raw, (size, fields) = make_peer(host, 4242, scope=7, flavour="linux").raw, TABLE[kind][1]
        parts = {name: raw[at : at + width] for name, (at, width) in fields.items()}
        assert len(raw) == size
        found = list(parts.values())
        assert found[0] == struct.pack("<H", family) and found[1] == struct.pack(">H", 4242)
        address = socket.inet_pton(socket.AF_INET6 if family == 10 else socket.AF_INET, host)
        assert parts["sin6_addr" if family == 10 else "sin_addr"] == address
        assert parts.get("sin6_scope_id", struct.pack("<I", 7)) == struct.pack("<I", 7)
