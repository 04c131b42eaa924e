"""The layouts of Windows are the ones written down here, and a layout that is off by anything is noticed."""

from __future__ import annotations

import ctypes
import uuid
from typing import Any

import pytest

from rnsfast.osio import layouts_windows as layout
from rnsfast.osio.peers import make_peer

TABLE = [
    "receive",
    "receive_ex",
    "send",
    "send_ex",
    "close_completion_queue",
    "create_completion_queue",
    "create_request_queue",
    "dequeue_completion",
    "deregister_buffer",
    "notify",
    "register_buffer",
    "resize_completion_queue",
    "resize_request_queue",
]

#: Size of the structure; offset and size of each field.
EXPECTED: dict[str, tuple[int, dict[str, tuple[int, int]]]] = {
    "Guid": (16, {"data1": (0, 4), "data2": (4, 2), "data3": (6, 2), "data4": (8, 8)}),
    "RioFunctionTable": (112, {"cb_size": (0, 4)} | {name: (8 + 8 * i, 8) for i, name in enumerate(TABLE)}),
    "RioBuf": (16, {"buffer_id": (0, 8), "offset": (8, 4), "length": (12, 4)}),
    "RioResult": (
        24,
        {"status": (0, 4), "transferred": (4, 4), "socket_context": (8, 8), "request_context": (16, 8)},
    ),
    "RioNotification": (32, {"type": (0, 4), "handle": (8, 8), "notify_reset": (16, 4), "overlapped": (24, 8)}),
    "SockaddrIn": (16, {"family": (0, 2), "port": (2, 2), "address": (4, 4), "zero": (8, 8)}),
    "SockaddrInet": (
        28,
        {"family": (0, 2), "port": (2, 2), "flowinfo": (4, 4), "address": (8, 16), "scope_id": (24, 4)},
    ),
    "WsaBuf": (16, {"len": (0, 4), "buf": (8, 8)}),
    "WsaMsg": (
        56,
        {
            "name": (0, 8),
            "namelen": (8, 4),
            "buffers": (16, 8),
            "buffer_count": (24, 4),
            "control": (32, 16),
            "flags": (48, 4),
        },
    ),
    "WsaCmsgHdr": (16, {"cmsg_len": (0, 8), "cmsg_level": (8, 4), "cmsg_type": (12, 4)}),
}


def agrees(structure: Any, name: str) -> bool:
    size, fields = EXPECTED[name]
    if ctypes.sizeof(structure) != size:
        return False
    for field, (offset, width) in fields.items():
        found = getattr(structure, field, None)
        if found is None or (found.offset, found.size) != (offset, width):
            return False
    return True


def with_fields(fields: list[tuple[str, Any]]) -> Any:
    return type("Mutant", (ctypes.Structure,), {"_fields_": fields})


def mutants() -> list[Any]:
    """Every structure with one field removed, or one width changed. Padding stands there whether declared or not."""
    found = []
    for name in EXPECTED:
        fields = list(getattr(layout, name)._fields_)
        for i, (field, kind) in enumerate(fields):
            if field.startswith("pad"):
                continue
            found.append(pytest.param(name, fields[:i] + fields[i + 1 :], id=f"{name} without {field}"))
            size = ctypes.sizeof(kind)
            other = {2: ctypes.c_uint32, 4: ctypes.c_uint64, 8: ctypes.c_uint32}.get(size, ctypes.c_uint8 * (size - 1))
            changed = [*fields[:i], (field, other), *fields[i + 1 :]]
            found.append(pytest.param(name, changed, id=f"{name} with another width of {field}"))
    return found


@pytest.mark.parametrize("name", EXPECTED)
def test_every_size_and_offset_is_as_in_the_headers_of_the_system(name: str) -> None:
    assert agrees(getattr(layout, name), name)


@pytest.mark.parametrize(("name", "fields"), mutants())
def test_a_layout_that_lost_a_field_or_changed_a_width_is_noticed(name: str, fields: list[tuple[str, Any]]) -> None:
    assert not agrees(with_fields(fields), name)


def test_no_width_depends_on_the_system() -> None:
    fixed = {ctypes.c_uint8, ctypes.c_uint16, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int32, layout.WsaBuf}
    for name in EXPECTED:
        for _, kind in getattr(layout, name)._fields_:
            assert getattr(kind, "_type_", kind) in fixed or kind in fixed


def test_guids_have_the_bytes_of_their_text() -> None:
    assert bytes(layout.WSAID_MULTIPLE_RIO) == uuid.UUID("8509E081-96DD-4005-B165-9E2EE8C79E3F").bytes_le
    assert bytes(layout.WSAID_WSARECVMSG) == uuid.UUID("F689D7C8-6F1F-436B-8A53-E54FE351C322").bytes_le


def test_constants() -> None:
    assert layout.SIO_GET_MULTIPLE_EXTENSION_FUNCTION_POINTER == 0xC8000024
    assert (layout.SIO_UDP_CONNRESET, layout.SIO_UDP_NETRESET) == (0x9800000C, 0x9800000F)
    assert (layout.RIO_MSG_DEFER, layout.RIO_MSG_COMMIT_ONLY) == (2, 8)
    assert (layout.AF_INET, layout.AF_INET6, layout.WSA_FLAG_REGISTERED_IO) == (2, 23, 0x100)
    assert 0x20000 <= layout.WINTUN_CAPACITY <= 0x4000000
    assert layout.WINTUN_CAPACITY & (layout.WINTUN_CAPACITY - 1) == 0


def test_addresses_have_the_bytes_of_the_structures() -> None:
    raw = make_peer("10.1.2.3", 4242, flavour="windows").raw
    short = layout.SockaddrIn.from_buffer_copy(raw)
    assert (short.family, bytes(short.address), raw[2:4]) == (layout.AF_INET, bytes([10, 1, 2, 3]), b"\x10\x92")
    raw = make_peer("fe80::1", 4242, scope=7, flavour="windows").raw
    long = layout.SockaddrInet.from_buffer_copy(raw)
    assert (long.family, long.scope_id, bytes(long.address)[:2]) == (layout.AF_INET6, 7, b"\xfe\x80")
