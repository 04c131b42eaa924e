"""The layouts of macOS are the ones written down here, and a layout that is off by anything is noticed."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from rnsfast.osio import layouts_darwin as layout
from rnsfast.osio import msgx
from rnsfast.osio.peers import make_peer

#: Size of the structure; offset and size of each field.
EXPECTED: dict[str, tuple[int, dict[str, tuple[int, int]]]] = {
    "MsghdrX": (
        56,
        {
            "msg_name": (0, 8),
            "msg_namelen": (8, 4),
            "msg_iov": (16, 8),
            "msg_iovlen": (24, 4),
            "msg_control": (32, 8),
            "msg_controllen": (40, 4),
            "msg_flags": (44, 4),
            "msg_datalen": (48, 8),
        },
    ),
    "Iovec": (16, {"iov_base": (0, 8), "iov_len": (8, 8)}),
    "SockaddrIn": (
        16,
        {"sin_len": (0, 1), "sin_family": (1, 1), "sin_port": (2, 2), "sin_addr": (4, 4), "sin_zero": (8, 8)},
    ),
    "SockaddrIn6": (
        28,
        {
            "sin6_len": (0, 1),
            "sin6_family": (1, 1),
            "sin6_port": (2, 2),
            "sin6_flowinfo": (4, 4),
            "sin6_addr": (8, 16),
            "sin6_scope_id": (24, 4),
        },
    ),
    "CtlInfo": (100, {"ctl_id": (0, 4), "ctl_name": (4, 96)}),
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
    """Every structure with one field removed, or one width changed."""
    found = []
    for name in EXPECTED:
        fields = list(getattr(layout, name)._fields_)
        for i, (field, kind) in enumerate(fields):
            removed = fields[:i] + fields[i + 1 :]
            found.append(pytest.param(name, removed, id=f"{name} without {field}"))
            size = ctypes.sizeof(kind)
            other = {1: ctypes.c_uint16, 2: ctypes.c_uint32, 4: ctypes.c_uint64, 8: ctypes.c_uint32}.get(
                size, ctypes.c_uint8 * (size - 1)
            )
            changed = [*fields[:i], (field, other), *fields[i + 1 :]]
            found.append(pytest.param(name, changed, id=f"{name} with another width of {field}"))
    return found


@pytest.mark.parametrize("name", EXPECTED)
def test_every_size_and_offset_is_as_in_the_headers_of_the_system(name: str) -> None:
    assert agrees(getattr(layout, name), name)


@pytest.mark.parametrize(("name", "fields"), mutants())
def test_a_layout_that_lost_a_field_or_changed_a_width_is_noticed(name: str, fields: list[tuple[str, Any]]) -> None:
    original = list(getattr(layout, name)._fields_)
    mutant = with_fields(fields)
    gone = {field for field, _ in original} - {field for field, _ in fields}
    if gone and gone <= {"pad", "pad2"}:  # the compiler puts the padding there anyway: the same structure
        assert agrees(mutant, name)
        return
    assert not agrees(mutant, name)


def test_the_positions_in_words_are_the_offsets() -> None:
    assert (msgx.STEP, msgx.IOVEC) == (7, 2)
    assert (msgx.W_NAME, msgx.W_IOV, msgx.W_DATALEN) == (0, 2, 6)
    assert (msgx.H_NAMELEN, msgx.H_IOVLEN, msgx.H_FLAGS) == (2, 6, 11)
    assert (msgx.W_BASE, msgx.W_LEN) == (0, 1)


def test_constants() -> None:
    assert (layout.MSG_DONTWAIT, layout.MSG_TRUNC, layout.MSG_CTRUNC) == (0x80, 0x10, 0x20)
    assert (layout.AF_INET, layout.AF_INET6, layout.PF_SYSTEM, layout.SYSPROTO_CONTROL) == (2, 30, 32, 2)
    assert 0xC0000000 | 100 << 16 | ord("N") << 8 | 3 == layout.CTLIOCGINFO
    assert ctypes.sizeof(layout.CtlInfo) == layout.CTLIOCGINFO >> 16 & 0x1FFF


def test_addresses_have_the_bytes_of_the_structures() -> None:
    raw = make_peer("10.1.2.3", 4242, flavour="darwin").raw
    short = layout.SockaddrIn.from_buffer_copy(raw)
    assert (short.sin_len, short.sin_family, bytes(short.sin_addr)) == (16, layout.AF_INET, bytes([10, 1, 2, 3]))
    assert raw[2:4] == (4242).to_bytes(2, "big")
    raw = make_peer("fe80::1", 4242, scope=7, flavour="darwin").raw
    long = layout.SockaddrIn6.from_buffer_copy(raw)
    assert (long.sin6_len, long.sin6_family, long.sin6_scope_id) == (28, layout.AF_INET6, 7)
    assert bytes(long.sin6_addr)[:2] == b"\xfe\x80"
