"""A transport node's tables on disk: written in parts, read back for the interfaces that are there.  Field case F11."""

from __future__ import annotations

import errno
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path as FilePath
from typing import Any

import msgpack
import pytest

from rnsfast import Node
from rnsfast.crypto.hashes import truncated
from rnsfast.crypto.identity import Identity
from rnsfast.engine.engine import Engine
from rnsfast.engine.known import PATH_LIFETIME, Path
from rnsfast.engine.port import Port
from rnsfast.engine.transport.blackhole import Ban
from rnsfast.errors import InterfaceError, StorageError
from rnsfast.node.storage import Storage
from rnsfast.node.transportstore import CACHE, HASHES, PATHS, TUNNELS, TransportStore
from rnsfast.wire.packet import ANNOUNCE, make_raw, packet_hash
from tests.virtualnet import Recorder

NOW = 1000.0


@pytest.fixture
def storage(tmp_path: FilePath) -> Iterator[Storage]:
    with Storage(tmp_path) as opened:
        yield opened


def engine(now: float = NOW) -> Engine:
    return Engine(
        Recorder(),  # type: ignore[arg-type]
        now,
        unix_offset=time.time() - now,
        transport_identity=Identity(),
        transport=True,
    )


def port(made: Engine, name: str) -> Port:
    found = Port(name)
    found.online = True
    made.attach(found, NOW)
    return found


def learn(made: Engine, on: Port, count: int, first: int = 0) -> dict[bytes, Path]:
    found: dict[bytes, Path] = {}
    unix_time = NOW + made.unix_offset
    for n in range(first, first + count):
        destination = n.to_bytes(16, "big")
        raw = make_raw(ANNOUNCE, destination, 0, n.to_bytes(4, "big") * 40)
        path = Path(
            unix_time - n, b"\x07" * 16, n % 100, unix_time + 1000, [bytes(10)], on, packet_hash(raw), announce=raw
        )
        made.paths.put(destination, path)
        found[destination] = path
    return found


def same(a: Path, b: Path) -> bool:
    return (a.heard_at, a.next_hop, a.hops, a.expires_at, a.blobs, a.packet_hash, a.announce) == (
        b.heard_at, b.next_hop, b.hops, b.expires_at, b.blobs, b.packet_hash, b.announce,
    )  # fmt: skip


def test_paths_come_back_when_their_interface_does(storage: Storage) -> None:
    before = engine()
    a, b = port(before, "A"), port(before, "B")
    on_a, on_b = learn(before, a, 1200), learn(before, b, 5, first=5000)
    before.seen.add(b"h" * 32)
    assert TransportStore(storage, threading.Lock()).save(before, hashes=True)
    after = engine()
    assert TransportStore(storage, threading.Lock()).load(after, time.time()) == 1205
    assert not after.paths.paths and b"h" * 32 in after.seen
    again = port(after, "A")
    assert set(after.paths.paths) == set(on_a)
    assert all(same(path, on_a[d]) and path.port is again for d, path in after.paths.paths.items())
    port(after, "B")
    assert set(after.paths.paths) == {*on_a, *on_b}


def test_tunnels_come_back_without_their_interface(storage: Storage) -> None:
    before = engine()
    a = port(before, "A")
    paths = learn(before, a, 3)
    assert before.transport is not None
    before.transport.tunnels.restore(b"t" * 32, dict(paths), time.time() + 100)
    TransportStore(storage, threading.Lock()).save(before, hashes=False)
    after = engine()
    TransportStore(storage, threading.Lock()).load(after, time.time())
    assert after.transport is not None
    tunnel = after.transport.tunnels.tunnels[b"t" * 32]
    assert tunnel.port is None and set(tunnel.paths) == set(paths)


def test_announces_are_written_once_and_removed_when_nothing_needs_them(storage: Storage) -> None:
    before = engine()
    a = port(before, "A")
    learn(before, a, 3)
    store = TransportStore(storage, threading.Lock())
    store.load(engine(), time.time())
    store.save(before, hashes=False)
    cache = storage.root / CACHE
    written = {path.name: path.stat().st_mtime_ns for path in cache.iterdir()}
    assert len(written) == 3
    before.paths.drop((1).to_bytes(16, "big"))
    learn(before, a, 1, first=9)
    store.save(before, hashes=False)
    now = {path.name: path.stat().st_mtime_ns for path in cache.iterdir()}
    assert len(now) == 3 and len(set(now) & set(written)) == 2
    assert all(now[name] == written[name] for name in set(now) & set(written))


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


@pytest.mark.parametrize("damage", [lambda d: b"", cut, lambda d: d[:-1], lambda d: bytes(len(d)), lambda d: d[::-1]])
@pytest.mark.parametrize("name", [PATHS, TUNNELS, HASHES])
def test_a_damaged_file_costs_itself_only(
    storage: Storage, name: str, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    before = engine()
    a = port(before, "A")
    learn(before, a, 40)
    before.seen.add(b"h" * 32)
    assert before.transport is not None
    before.transport.tunnels.restore(b"t" * 32, learn(before, a, 2, first=90), time.time() + 100)
    TransportStore(storage, threading.Lock()).save(before, hashes=True)
    path = storage.root / name
    path.write_bytes(damage(path.read_bytes()))
    after = engine()
    TransportStore(storage, threading.Lock()).load(after, time.time())
    port(after, "A")
    assert after.transport is not None
    if name != PATHS:
        assert len(after.paths.paths) == 42
    if name != TUNNELS:
        assert len(after.transport.tunnels.tunnels) == 1
    if name == HASHES:
        assert TransportStore(storage, threading.Lock()).save(after, hashes=True)
    else:
        assert b"h" * 32 in after.seen
        assert any(name in record.message for record in caplog.records), "it is said"
        assert [p.name for p in storage.root.glob(f"{name}.damaged-*")]


def test_a_damaged_announce_costs_its_path_only(storage: Storage) -> None:
    before = engine()
    learn(before, port(before, "A"), 5)
    TransportStore(storage, threading.Lock()).save(before, hashes=False)
    files = sorted((storage.root / CACHE).iterdir())
    files[0].write_bytes(b"\x92\xc4")
    files[1].write_bytes(files[2].read_bytes())  # another one's
    after = engine()
    assert TransportStore(storage, threading.Lock()).load(after, time.time()) == 3
    assert not files[0].exists() and not files[1].exists()


def test_old_paths_and_other_interfaces_are_left_out(storage: Storage) -> None:
    before = engine()
    a = port(before, "A")
    old = learn(before, a, 1)
    next(iter(old.values())).heard_at -= 8 * 86400
    learn(before, a, 1, first=1)
    TransportStore(storage, threading.Lock()).save(before, hashes=False)
    after = engine()
    assert TransportStore(storage, threading.Lock()).load(after, time.time()) == 1
    port(after, "somebody else")
    assert not after.paths.paths


def test_nothing_is_written_where_nothing_can_be(storage: Storage) -> None:
    before = engine()
    learn(before, port(before, "A"), 2)
    (storage.root / PATHS).mkdir()
    (storage.root / PATHS / "x").write_bytes(b"")
    store = TransportStore(storage, threading.Lock())
    assert not store.save(before, hashes=False)
    (storage.root / PATHS / "x").unlink()
    (storage.root / PATHS).rmdir()
    assert store.save(before, hashes=False)


def test_the_lock_is_free_between_parts(storage: Storage) -> None:
    before = engine()
    learn(before, port(before, "A"), 2100)
    takes = [0]

    class Counted:
        def __enter__(self) -> None:
            takes[0] += 1

        def __exit__(self, *exc: object) -> None:
            pass

    TransportStore(storage, Counted()).save(before, hashes=False)
    assert takes[0] >= 6  # the keys, five parts, and what else there is


def rewrite(storage: Storage, change: Callable[[list[Any]], None]) -> None:
    """Have every row of the stored table changed."""
    path = storage.root / PATHS
    rows = msgpack.unpackb(path.read_bytes())
    for row in rows:
        change(row)
    path.write_bytes(msgpack.packb(rows))


def loaded(storage: Storage, made: Engine | None = None) -> dict[bytes, Path]:
    after = engine() if made is None else made
    TransportStore(storage, threading.Lock()).load(after, time.time())
    port(after, "A")
    return after.paths.paths


def saved(storage: Storage, count: int = 3) -> dict[bytes, Path]:
    before = engine()
    paths = learn(before, port(before, "A"), count)
    assert TransportStore(storage, threading.Lock()).save(before)
    return paths


def test_times_ahead_of_the_clock_count_as_now(storage: Storage) -> None:
    saved(storage)

    def far(row: list[Any]) -> None:
        row[1], row[4] = 1e300, 1e300

    rewrite(storage, far)
    paths = loaded(storage)
    assert len(paths) == 3
    assert all(p.heard_at <= time.time() and p.expires_at <= time.time() + PATH_LIFETIME for p in paths.values())


def test_a_path_heard_far_in_the_future_is_left_out(storage: Storage) -> None:
    """No announce could replace it: they are refused for their time (trap T4)."""
    saved(storage)
    rewrite(storage, lambda row: row.__setitem__(5, [b"\xff" * 10]))
    assert not loaded(storage)


def test_an_announce_of_another_destination_is_no_announce(storage: Storage) -> None:
    first, *_ = saved(storage, 2)
    rewrite(storage, lambda row: row.__setitem__(0, b"\x55" * 16 if row[0] == first else row[0]))
    assert len(loaded(storage)) == 1


def test_a_blackholed_identity_has_no_paths_after_a_restart(storage: Storage) -> None:
    """Trap T14: by the key in the announce, so it does not matter whether the destination is known."""
    before = engine()
    paths = learn(before, port(before, "A"), 3)
    banned, path = next(iter(paths.items()))
    assert before.transport is not None
    before.transport.tunnels.restore(b"t" * 32, dict(paths), time.time() + 100)
    TransportStore(storage, threading.Lock()).save(before)
    after = engine()
    after.ban(truncated(path.announce[19:83]), Ban(bytes(16)), 0.0)
    assert set(loaded(storage, after)) == set(paths) - {banned}
    assert after.transport is not None
    assert [set(tunnel.paths) for tunnel in after.transport.tunnels.tunnels.values()] == [set(paths) - {banned}]


def test_a_tunnel_shares_its_announces_with_the_table_and_is_bounded_in_time(storage: Storage) -> None:
    before = engine()
    paths = learn(before, port(before, "A"), 3)
    assert before.transport is not None
    tunnels = before.transport.tunnels
    tunnels.restore(b"t" * 32, dict(paths), time.time() + 1e9)
    tunnels.restore(b"o" * 32, dict(paths), time.time() - 1)
    TransportStore(storage, threading.Lock()).save(before)
    after = engine()
    active = loaded(storage, after)
    assert after.transport is not None
    (tunnel,) = after.transport.tunnels.tunnels.values()
    assert tunnel.id == b"t" * 32 and tunnel.expires_at < time.time() + 8 * 3600 + 1
    assert all(path.announce is active[d].announce for d, path in tunnel.paths.items())


def test_a_large_tunnel_is_copied_in_parts(storage: Storage) -> None:
    before = engine()
    a = port(before, "A")
    many = learn(before, a, 1200)
    assert before.transport is not None
    before.transport.tunnels.restore(b"t" * 32, dict(many), time.time() + 100)
    before.paths.paths.clear()
    TransportStore(storage, threading.Lock()).save(before)
    after = engine()
    assert not loaded(storage, after)
    assert after.transport is not None
    (tunnel,) = after.transport.tunnels.tunnels.values()
    assert len(tunnel.paths) == 1200 and all(same(path, many[d]) for d, path in tunnel.paths.items())


def test_paths_whose_interface_has_not_come_up_are_kept(storage: Storage) -> None:
    """A start that fails, or a stop before the device was there, loses nothing."""
    paths = saved(storage)
    middle = engine()
    store = TransportStore(storage, threading.Lock())
    assert store.load(middle, time.time()) == 3
    assert store.save(middle) and len(list((storage.root / CACHE).iterdir())) == 3
    assert set(loaded(storage)) == set(paths)
    assert store.save(middle, waiting=False)
    assert not loaded(storage) and not list((storage.root / CACHE).iterdir())


def test_a_node_that_fails_to_start_leaves_the_table_alone(tmp_path: FilePath) -> None:
    with Storage(tmp_path) as storage:
        saved(storage)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"type = TCPServerInterface\nlisten_ip = 127.0.0.1\nlisten_port = {taken.getsockname()[1]}\n"
        (tmp_path / "config").write_text(
            f"[reticulum]\nshare_instance = no\nenable_transport = yes\n[interfaces]\n[[a]]\nenabled = yes\n{listen}"
        )
        with pytest.raises(InterfaceError):
            Node(tmp_path, strict=True).start()
    with Storage(tmp_path) as storage:
        assert len(loaded(storage)) == 3


def test_a_file_that_would_be_the_same_is_not_written(storage: Storage) -> None:
    before = engine()
    learn(before, port(before, "A"), 3)
    store = TransportStore(storage, threading.Lock())
    assert store.save(before)
    files = [storage.root / PATHS, storage.root / TUNNELS]
    inodes = [file.stat().st_ino for file in files]
    assert store.save(before) and [file.stat().st_ino for file in files] == inodes
    files[0].unlink()
    assert store.save(before) and files[0].is_file()
    learn(before, before.ports[0], 1, first=7)
    inode = files[0].stat().st_ino
    assert store.save(before) and files[0].stat().st_ino != inode and files[1].stat().st_ino == inodes[1]


def test_an_empty_list_of_hashes_is_not_damaged(storage: Storage, caplog: pytest.LogCaptureFixture) -> None:
    (storage.root / HASHES).write_bytes(b"")
    TransportStore(storage, threading.Lock()).load(engine(), time.time())
    assert not caplog.records and (storage.root / HASHES).is_file()


@pytest.mark.parametrize("fault", ["full", "short"])
def test_a_full_disk_is_reported_once_and_leaves_no_half_announce(
    storage: Storage, fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = engine()
    paths = learn(before, port(before, "A"), 3)
    store = TransportStore(storage, threading.Lock())
    write = os.write

    def full(descriptor: int, data: bytes) -> int:
        if fault == "short":
            return write(descriptor, data[:7])
        raise OSError(errno.ENOSPC, "No space left on device")

    caplog.set_level(logging.INFO)
    with monkeypatch.context() as patch:
        patch.setattr("rnsfast.node.transportstore.os.write", full)
        patch.setattr(storage, "_write", refuse)
        assert not store.save(before) and not store.save(before)
    said = [record.message for record in caplog.records if "announces cannot be written" in record.message]
    assert len(said) == 1 and not list((storage.root / CACHE).iterdir())
    assert store.save(before) and any("can be written again" in record.message for record in caplog.records)
    assert set(loaded(storage)) == set(paths)


def refuse(path: FilePath, data: bytes) -> None:
    raise StorageError(f"{path}: cannot be written (No space left on device); what it held before is intact")


def test_a_cache_that_cannot_be_used_costs_the_paths_only(storage: Storage, caplog: pytest.LogCaptureFixture) -> None:
    (storage.root / "cache").write_bytes(b"a file where a directory belongs")
    before = engine()
    learn(before, port(before, "A"), 3)
    store = TransportStore(storage, threading.Lock())
    assert not store.save(before) and not loaded(storage)
    assert any("announces cannot be kept there" in record.message for record in caplog.records)


def test_two_saves_at_a_time_wait_for_each_other(storage: Storage) -> None:
    before = engine()
    paths = learn(before, port(before, "A"), 600)
    store = TransportStore(storage, threading.Lock())
    results: list[bool] = []
    threads = [threading.Thread(target=lambda: results.append(store.save(before))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == [True] * 4
    assert set(loaded(storage)) == set(paths)


SAVER = """
import sys, threading
from pathlib import Path
from rnsfast.node.storage import Storage
from rnsfast.node.transportstore import TransportStore
from tests.node.test_transport_store import engine, learn, port
with Storage(Path(sys.argv[1])) as storage:
    made, store, n = engine(), TransportStore(storage, threading.Lock()), 0
    a = port(made, "A")
    while True:
        learn(made, a, 50, first=n)
        n = (n + 50) % 2000
        made.paths.drop(n.to_bytes(16, "big"))
        assert store.save(made)
        print(n, flush=True)
"""


def test_a_node_killed_while_saving_leaves_whole_tables(tmp_path: FilePath, caplog: pytest.LogCaptureFixture) -> None:
    """Every kill is in the middle of the save after the one that was said."""
    for kills in range(1, 6):
        with subprocess.Popen([sys.executable, "-c", SAVER, tmp_path], stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            for _ in range(kills):
                assert child.stdout.readline()
            child.kill()
        with Storage(tmp_path) as storage:
            assert len(loaded(storage)) >= 49
            assert not [name for name in os.listdir(storage.root / CACHE) if ".unfinished" in name]
            assert not [name for name in os.listdir(storage.root) if ".unfinished" in name or ".damaged" in name]
        for name in (PATHS, TUNNELS):
            (tmp_path / "storage" / name).unlink()
    assert not caplog.records
