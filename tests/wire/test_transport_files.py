"""The files of a transport node, against samples written by the reference."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, isfinite, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rnsfast.wire.packet import packet_hash
from rnsfast.wire.storedmsgpack import pack
from rnsfast.wire.transportfiles import (
    StoredPath,
    StoredTunnel,
    build_announce_file,
    build_list,
    pack_paths,
    pack_tunnel,
    parse_announce_file,
    parse_hashes,
    parse_tunnels,
    read_paths,
)
from tests.vectors_support import unhex, vectors

ALL = 1 << 30
FILES = vectors("transport", "files")
HASHES = {entry["name"]: unhex(entry["hash"]) for entry in FILES["interfaces"]}


def test_the_path_table_reads_and_writes_the_same_bytes() -> None:
    raw = unhex(FILES["destination_table"]["bytes"])
    paths = list(read_paths(raw, ALL))
    found = [
        [p.destination.hex(), p.heard_at, p.next_hop.hex(), p.hops, p.expires_at, [b.hex() for b in p.blobs],
         next(name for name, digest in HASHES.items() if digest == p.interface), p.packet_hash.hex()]
        for p in paths
    ]  # fmt: skip
    assert found == FILES["path_table"]
    assert build_list([pack_paths(paths)], len(paths)) == raw
    assert list(read_paths(raw, 1)) == paths[-1:] and list(read_paths(raw, 0)) == []


def test_tunnels_read_and_write_the_same_bytes() -> None:
    raw = unhex(FILES["tunnels"]["bytes"])
    tunnels = parse_tunnels(raw)
    assert tunnels
    assert build_list([packed(tunnel) for tunnel in tunnels], len(tunnels)) == raw


def packed(tunnel: StoredTunnel) -> bytes:
    rows = [pack_paths([path]) for path in tunnel.paths]
    return pack_tunnel(tunnel.id, tunnel.interface, rows, len(rows), tunnel.expires_at)


def test_announces_are_kept_under_their_hash() -> None:
    for entry in FILES["announce_cache"]:
        raw = unhex(entry["bytes"])
        announce = parse_announce_file(raw)
        assert announce is not None
        assert packet_hash(announce).hex() == entry["file"].rpartition("/")[2]
        assert any(build_announce_file(announce, name) == raw for name in (None, *HASHES))


def test_hashes_are_records_of_32_bytes() -> None:
    wanted = [unhex(h) for h in FILES["packet_hashlist"]["hashes"]]
    raw = b"".join(wanted)
    assert sorted(parse_hashes(raw, ALL)) == sorted(wanted) and parse_hashes(raw, 1) == wanted[:1]
    assert parse_hashes(b"x" * 70, ALL) == [b"x" * 32] * 2 and parse_hashes(b"", ALL) == []


def paths_or_none(file: bytes) -> list[StoredPath] | None:
    try:
        return list(read_paths(file, ALL))
    except ValueError:
        return None


@pytest.mark.parametrize("parse", [paths_or_none, parse_tunnels, parse_announce_file])
@given(st.binary(max_size=300))
def test_damaged_files_are_told_and_never_raise(parse: Callable[[bytes], object], data: bytes) -> None:
    assert not parse(data) or data


@given(st.integers(0, 400), st.binary(max_size=20), st.booleans())
def test_rows_that_make_no_sense_are_left_out(at: int, noise: bytes, cut: bool) -> None:
    raw = unhex(FILES["destination_table"]["bytes"])
    damaged = raw[: at % len(raw)] + noise + (b"" if cut else raw[at % len(raw) + len(noise) :])
    for path in paths_or_none(damaged) or []:
        assert len(path.destination) == len(path.next_hop) == 16 and 0 <= path.hops <= 128
        assert isfinite(path.heard_at) and isfinite(path.expires_at)


ROW = [bytes(16), 1.0, bytes(16), 3, 2.0, [bytes(10)], bytes(32), bytes(32)]
WRONG = [
    (0, bytes(15)), (0, "x" * 16), (1, nan), (1, inf), (1, None), (2, bytes(17)), (3, -1), (3, 129), (3, 1.5),
    (3, 1 << 63), (4, -inf), (4, b""), (5, [bytes(9)]), (5, [1]), (5, {}), (6, bytes(16)), (7, None), (7, []),
]  # fmt: skip


@pytest.mark.parametrize(("at", "value"), WRONG)
def test_a_hostile_value_costs_its_row(at: int, value: object) -> None:
    row = [*ROW[:at], value, *ROW[at + 1 :]]
    assert list(read_paths(pack([ROW, row, ROW]), ALL)) == list(read_paths(pack([ROW, ROW]), ALL))
    assert len(list(read_paths(pack([ROW]), ALL))) == 1
    with pytest.raises(ValueError, match="none of its entries"):
        list(read_paths(pack([row]), ALL))
    (tunnel,) = parse_tunnels(pack([[bytes(32), None, [row, ROW], 9.0]])) or ()
    assert len(tunnel.paths) == 1


@pytest.mark.parametrize(
    "file", [b"", b"\xc0", b"\x80", b"\xdd\xff\xff\xff\xff", b"\x91" * 5000, pack([]) + b"x", pack([1, 2]), pack([[]])]
)
def test_files_of_something_else_are_damaged(file: bytes) -> None:
    assert paths_or_none(file) is None and parse_tunnels(file) is None


def test_an_empty_table_is_a_table() -> None:
    assert paths_or_none(pack([])) == [] and parse_tunnels(pack([])) == []


def test_as_many_random_blobs_as_a_path_has_are_read() -> None:
    row = [*ROW[:5], [n.to_bytes(10, "big") for n in range(100)], *ROW[6:]]
    (path,) = read_paths(pack([row]), ALL)
    assert path.blobs == tuple(n.to_bytes(10, "big") for n in range(36, 100))
