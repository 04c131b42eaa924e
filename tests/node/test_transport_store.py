"""A transport node's tables on disk: written in parts, read back for the interfaces that are there.  Field case F11."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path as FilePath

import pytest

from rnsfast.crypto.identity import Identity
from rnsfast.engine.engine import Engine
from rnsfast.engine.known import Path
from rnsfast.engine.port import Port
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
