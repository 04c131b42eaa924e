"""The files of a transport node, against samples written by the reference."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rnsfast.wire.packet import packet_hash
from rnsfast.wire.transportfiles import (
    StoredTunnel,
    build_announce_file,
    build_list,
    parse_announce_file,
    parse_hashes,
    parse_paths,
    parse_tunnels,
    tunnel_row,
)
from tests.vectors_support import unhex, vectors

FILES = vectors("transport", "files")
HASHES = {entry["name"]: unhex(entry["hash"]) for entry in FILES["interfaces"]}


def test_the_path_table_reads_and_writes_the_same_bytes() -> None:
    raw = unhex(FILES["destination_table"]["bytes"])
    paths = parse_paths(raw)
    assert paths is not None
    found = [
        [p.destination.hex(), p.heard_at, p.next_hop.hex(), p.hops, p.expires_at, [b.hex() for b in p.blobs],
         next(name for name, digest in HASHES.items() if digest == p.interface), p.packet_hash.hex()]
        for p in paths
    ]  # fmt: skip
    assert found == FILES["path_table"]
    assert build_list([[p.row() for p in paths]], len(paths)) == raw


def test_tunnels_read_and_write_the_same_bytes() -> None:
    raw = unhex(FILES["tunnels"]["bytes"])
    tunnels = parse_tunnels(raw)
    assert tunnels
    assert build_list([[tunnel_row(tunnel)] for tunnel in tunnels], len(tunnels)) == raw


def test_announces_are_kept_under_their_hash() -> None:
    for entry in FILES["announce_cache"]:
        raw = unhex(entry["bytes"])
        announce = parse_announce_file(raw)
        assert announce is not None
        assert packet_hash(announce).hex() == entry["file"].rpartition("/")[2]
        assert any(build_announce_file(announce, name) == raw for name in (None, *HASHES))


def test_hashes_are_records_of_32_bytes() -> None:
    wanted = [unhex(h) for h in FILES["packet_hashlist"]["hashes"]]
    assert sorted(parse_hashes(b"".join(wanted)) or []) == sorted(wanted)
    assert parse_hashes(b"x" * 70) == [b"x" * 32] * 2 and parse_hashes(b"") is None


@pytest.mark.parametrize("parse", [parse_paths, parse_tunnels, parse_announce_file])
@given(st.binary(max_size=300))
def test_damaged_files_are_told_and_never_raise(parse: object, data: bytes) -> None:
    assert parse(data) is None or data  # type: ignore[operator]


@given(st.integers(0, 400), st.binary(max_size=20), st.booleans())
def test_rows_that_make_no_sense_are_left_out(at: int, noise: bytes, cut: bool) -> None:
    raw = unhex(FILES["destination_table"]["bytes"])
    damaged = raw[: at % len(raw)] + noise + (b"" if cut else raw[at % len(raw) + len(noise) :])
    for path in parse_paths(damaged) or []:
        assert len(path.destination) == len(path.next_hop) == 16 and 0 <= path.hops <= 128


def test_a_table_in_parts_is_the_table() -> None:
    rows: list[list[object]] = [[n, b"x"] for n in range(1200)]
    assert build_list([rows[:500], rows[500:1000], rows[1000:]], 1200) == build_list([rows], 1200)
    assert parse_tunnels(build_list([[tunnel_row(StoredTunnel(bytes(32), None, (), 5.0))]], 1)) == [
        StoredTunnel(bytes(32), None, (), 5.0)
    ]
