"""The node's files: damage never keeps it from starting, and a crash never leaves half a file."""

from __future__ import annotations

import errno
import logging
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rnsfast.crypto.identity import Identity
from rnsfast.errors import StorageError
from rnsfast.node.files import read_file, read_or_set_aside
from rnsfast.node.storage import Storage, atomic_write, load_ring, save_ring
from rnsfast.wire.knowndest import KnownDestination
from rnsfast.wire.ratchets import RATCHET_EXPIRY
from tests.vectors_support import maybe, unhex, vectors

NOW = vectors("node", "fixed_time")
DESTINATION = bytes(range(16))
RATCHET = bytes(range(32))


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[Storage]:
    with Storage(tmp_path / "node") as opened:
        yield opened


def entries(count: int = 500, seed: int = 1) -> list[KnownDestination]:
    bits = random.Random(seed)
    return [
        KnownDestination(bits.randbytes(16), NOW + n, bits.randbytes(32), bits.randbytes(64), bits.randbytes(20), 0)
        for n in range(count)
    ]


def unfinished(directory: Path) -> list[str]:
    return [name for name in os.listdir(directory) if ".unfinished-" in name]


# -- formats ----------------------------------------------------------------------------------------------------------


def test_known_destinations_are_the_bytes_the_reference_writes_and_reads(storage: Storage) -> None:
    case = vectors("node", "persisted", "known_destinations")
    expected = [
        KnownDestination(
            unhex(e["destination_hash"]),
            e["last_announce"],
            unhex(e["packet_hash"]),
            unhex(e["public_key"]),
            maybe(e["app_data"]),
            e["use"],
        )
        for e in case["entries"]
    ]
    path = storage.root / "known_destinations"
    path.write_bytes(unhex(case["file"]))
    assert storage.load_known_destinations() == expected
    assert storage.save_known_destinations(expected)
    assert path.read_bytes() == unhex(case["file"])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_known_destinations_of_older_releases_are_read(storage: Storage) -> None:
    case = vectors("node", "persisted", "known_destinations_legacy")
    (storage.root / "known_destinations").write_bytes(unhex(case["file"]))
    (found,) = storage.load_known_destinations()
    ((destination, fields),) = case["loaded"].items()
    assert (found.destination, found.public_key, found.used) == (unhex(destination), unhex(fields[2]), 0)


def test_a_peer_ratchet_is_the_file_the_reference_writes(storage: Storage) -> None:
    case = vectors("node", "persisted", "peer_ratchet")
    destination = unhex(case["path"].split("/")[1])
    assert storage.save_peer_ratchet(destination, unhex(case["ratchet_public"]), case["received"])
    assert (storage.root / case["path"]).read_bytes() == unhex(case["file"])
    assert storage.load_peer_ratchet(destination, NOW) == unhex(case["ratchet_public"])


def test_a_ring_is_the_file_the_reference_writes(tmp_path: Path) -> None:
    case = vectors("node", "persisted", "own_ratchets")
    keys, owner = (
        list(map(unhex, case["private_ratchets_newest_first"])),
        Identity.from_private(unhex(case["identity"])),
    )
    save_ring(tmp_path / "ring", keys, owner)
    assert (tmp_path / "ring").read_bytes() == unhex(case["file"])
    assert load_ring(tmp_path / "ring", owner) == keys


# -- ratchets of others -----------------------------------------------------------------------------------------------


def test_hearing_the_same_ratchet_again_does_not_extend_its_life(storage: Storage) -> None:
    storage.save_peer_ratchet(DESTINATION, RATCHET, NOW)
    storage.save_peer_ratchet(DESTINATION, RATCHET, NOW + 1000)
    assert storage.load_peer_ratchet(DESTINATION, NOW + RATCHET_EXPIRY - 1) == RATCHET
    assert storage.load_peer_ratchet(DESTINATION, NOW + RATCHET_EXPIRY) is None
    storage.save_peer_ratchet(DESTINATION, RATCHET[::-1], NOW + 1000)
    assert storage.load_peer_ratchets(NOW + 1) == {DESTINATION: (RATCHET[::-1], NOW + 1000)}


def test_cleaning_removes_old_ratchets_and_those_of_unknown_destinations(storage: Storage) -> None:
    fresh, old, stranger = (bytes([n] * 16) for n in range(3))
    storage.save_peer_ratchet(fresh, RATCHET, NOW)
    storage.save_peer_ratchet(old, RATCHET, NOW - RATCHET_EXPIRY)
    storage.save_peer_ratchet(stranger, RATCHET, NOW)
    damaged = storage.root / "ratchets" / ("ff" * 16)
    damaged.write_bytes(b"x")
    assert storage.clean_peer_ratchets({fresh, old}, NOW) == 2
    assert list(storage.load_peer_ratchets(NOW)) == [fresh]
    assert not damaged.exists()
    os.utime(damaged.with_name(damaged.name + ".damaged-1"), (NOW - 2 * RATCHET_EXPIRY,) * 2)
    storage.clean_peer_ratchets({fresh}, NOW)
    assert os.listdir(storage.root / "ratchets") == [fresh.hex()]


# -- damage -----------------------------------------------------------------------------------------------------------


def replace_by_directory(path: Path) -> None:
    path.unlink()
    (path / "inside").mkdir(parents=True)


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def rewrite(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda path: (path.write_bytes(change(path.read_bytes())) and None) or None


DAMAGE: dict[str, Callable[[Path], None]] = {
    "empty": rewrite(lambda data: b""),
    "half": rewrite(lambda data: data[: len(data) // 2]),
    "all but one": rewrite(lambda data: data[:-1]),
    "zeros": rewrite(lambda data: bytes(len(data))),
    "random": rewrite(lambda data: random.Random(5).randbytes(len(data))),
    "directory": replace_by_directory,
    "pipe": replace_by_pipe,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=list(DAMAGE))
@pytest.mark.parametrize("name", ["known_destinations", f"ratchets/{DESTINATION.hex()}", "ring", "lock"])
def test_a_damaged_file_is_set_aside_reported_once_and_written_anew(
    name: str, damage: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    identity = Identity()
    ring = tmp_path / "node" / "storage" / "ring"

    def save(storage: Storage) -> None:
        assert storage.save_known_destinations(entries())
        assert storage.save_peer_ratchet(DESTINATION, RATCHET, NOW)
        save_ring(ring, [RATCHET], identity)

    def load(storage: Storage) -> dict[str, object]:
        return {
            "known_destinations": storage.load_known_destinations(),
            f"ratchets/{DESTINATION.hex()}": storage.load_peer_ratchet(DESTINATION, NOW),
            "ring": load_ring(ring, identity),
            "lock": True,
        }

    with Storage(tmp_path / "node") as storage:
        save(storage)
        whole = load(storage)
        own = storage.transport_identity()
    path = tmp_path / "node" / "storage" / name
    damage(path)
    with Storage(tmp_path / "node") as storage:
        loaded = load(storage)
        assert all(loaded[other] == whole[other] for other in whole if other != name)  # the others are intact
        assert storage.transport_identity() == own
        if name == "lock":
            return  # its content does not matter
        assert not loaded[name]
        assert not path.exists() and path.with_name(path.name + ".damaged-1").exists()
        load(storage)
        (record,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
        assert str(path) in record.getMessage() and "lost: " in record.getMessage()
        save(storage)
        assert load(storage) == whole


def test_a_second_damaged_copy_does_not_replace_the_first(tmp_path: Path) -> None:
    path = tmp_path / "table"
    for content in (b"one", b"two"):
        path.write_bytes(content)
        assert read_or_set_aside(path, lambda data: None) is None
    assert [(tmp_path / f"table.damaged-{n}").read_bytes() for n in (1, 2)] == [b"one", b"two"]


def test_an_unreadable_file_that_cannot_be_moved_is_reported_and_nothing_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "table"
    path.write_bytes(b"x")

    def refuse(*_: object, **__: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("rnsfast.node.files.os.open", refuse)
    monkeypatch.setattr("rnsfast.node.files.os.rename", refuse)
    assert read_or_set_aside(path, bytes, lost="the table") is None
    (record,) = caplog.records
    assert "Permission denied" in record.getMessage() and "the table" in record.getMessage()


def test_a_file_beyond_the_limit_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "table"
    path.write_bytes(bytes(11))
    assert read_or_set_aside(path, bytes, limit=10) is None
    assert path.with_name("table.damaged-1").exists()


def test_a_ring_signed_by_somebody_else_is_not_used(tmp_path: Path) -> None:
    save_ring(tmp_path / "ring", [RATCHET], Identity())
    assert load_ring(tmp_path / "ring", Identity()) == []


# -- the identity -----------------------------------------------------------------------------------------------------


def test_the_identity_is_made_once_and_only_its_owner_can_read_it(storage: Storage) -> None:
    identity = storage.transport_identity()
    path = storage.root / "transport_identity"
    assert path.read_bytes() == identity.private_key
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert storage.transport_identity() == identity


def test_the_identity_of_another_implementation_is_taken_over(storage: Storage) -> None:
    private = unhex(vectors("node", "identities")[0]["rid_file"])
    (storage.root / "transport_identity").write_bytes(private)
    assert storage.transport_identity().private_key == private


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=list(DAMAGE))
def test_a_damaged_identity_is_never_replaced(damage: Callable[[Path], None], storage: Storage) -> None:
    storage.transport_identity()
    path = storage.root / "transport_identity"
    damage(path)
    before = path.read_bytes() if path.is_file() else None
    for _ in range(2):
        with pytest.raises(StorageError, match=r"transport_identity: .*restore it from a backup, or remove it"):
            storage.transport_identity()
    assert (path.read_bytes() if path.is_file() else None) == before


def test_the_user_can_decide_for_a_new_identity_or_for_the_changed_one(storage: Storage) -> None:
    first = storage.transport_identity()
    path, check = storage.root / "transport_identity", storage.root / "transport_identity.hash"
    path.unlink()
    second = storage.transport_identity()
    assert second != first and storage.transport_identity() == second
    path.write_bytes(first.private_key)
    check.unlink()
    assert storage.transport_identity() == first and storage.transport_identity() == first


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=list(DAMAGE))
def test_a_damaged_check_file_is_made_again(damage: Callable[[Path], None], storage: Storage) -> None:
    identity = storage.transport_identity()
    check = storage.root / "transport_identity.hash"
    damage(check)
    if damage is DAMAGE["all but one"]:
        return  # that was only the line end
    assert storage.transport_identity() == identity
    assert check.read_text().strip() == identity.hash.hex()


# -- writing ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A directory on a disk of 256 KiB."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = shutil.which("mount")
    if (
        mount is None
        or subprocess.run(
            [mount, "-t", "tmpfs", "-o", "size=256k", "none", path], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("file systems cannot be mounted here")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


def test_a_full_disk_costs_one_warning_and_no_file(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Storage(small_disk / "node") as storage:
        assert storage.save_known_destinations(entries(100))
        (small_disk / "ballast").write_bytes(bytes(150_000))
        for _ in range(3):
            assert not storage.save_known_destinations(entries(800, seed=2))
        assert len(storage.load_known_destinations()) == 100
        assert unfinished(storage.root) == []
        (record,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
        assert "No space left on device, ENOSPC" in record.getMessage()
        (small_disk / "ballast").unlink()
        with caplog.at_level(logging.INFO):
            assert storage.save_known_destinations(entries(800, seed=2))
        assert "saving works again" in caplog.text
        assert len(storage.load_known_destinations()) == 800


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_whatever_fails_while_writing_leaves_the_old_file_alone(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "table"
    atomic_write(path, b"old")

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(f"rnsfast.node.files.os.{call}", fail)
        with pytest.raises(StorageError, match=r"table: cannot be written \(Input/output error, EIO\)"):
            atomic_write(path, b"new")
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["table"]


def test_a_short_write_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr("rnsfast.node.files.os.write", lambda fd, data: write(fd, data[:3]))
    atomic_write(tmp_path / "table", b"0123456789")
    assert (tmp_path / "table").read_bytes() == b"0123456789"


def test_writing_through_a_symbolic_link_keeps_the_link(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to("real")
    atomic_write(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_bytes() == b"new"


def test_a_missing_directory_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot be written"):
        atomic_write(tmp_path / "nowhere" / "table", b"x")
    assert read_file(tmp_path / "nowhere" / "table") is None


SAVER = """
import os, sys
from pathlib import Path
from rnsfast.node.storage import Storage
from rnsfast.wire.knowndest import KnownDestination
storage = Storage(Path(sys.argv[1]))
storage.open()
n = 0
while True:
    n += 1
    entry = [KnownDestination(i.to_bytes(16, "big"), float(n), bytes(32), bytes(64), None, 0) for i in range(200)]
    assert storage.save_known_destinations(entry)
    assert storage.save_peer_ratchet(bytes(16), n.to_bytes(32, "big"), float(n))
    os.write(1, b"s")
"""


@pytest.mark.slow
def test_a_node_killed_while_saving_never_leaves_an_unreadable_file(tmp_path: Path) -> None:
    bits = random.Random(11)
    newest = 0.0
    for _ in range(20):
        with subprocess.Popen([sys.executable, "-c", SAVER, tmp_path], stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            saves = bits.randrange(1, 40)
            assert len(child.stdout.read(saves)) == saves  # blocks until it has saved so often
            child.send_signal(signal.SIGKILL)
        with Storage(tmp_path) as storage:  # the lock of the killed one is gone
            found = storage.load_known_destinations()
            assert len(found) == 200 and len({entry.received for entry in found}) == 1
            assert found[0].received >= saves
            assert storage.load_peer_ratchet(bytes(16), 0.0) is not None
            assert unfinished(storage.root) == unfinished(storage.root / "ratchets") == []
            assert not list(storage.root.rglob("*.damaged-*"))
        newest = max(newest, found[0].received)
    assert newest > 1


# -- the lock ---------------------------------------------------------------------------------------------------------


def test_a_second_node_on_the_directory_refuses_with_one_sentence(tmp_path: Path) -> None:
    first, second = Storage(tmp_path), Storage(tmp_path)
    first.open()
    first.open()  # idempotent
    with pytest.raises(StorageError) as caught:
        second.open()
    assert str(caught.value).startswith(f"{tmp_path}: another node (process {os.getpid()}) is using this directory")
    first.close()
    first.close()
    second.open()
    second.close()


def test_opening_removes_what_a_killed_writer_left(tmp_path: Path) -> None:
    left = tmp_path / "storage" / "known_destinations.unfinished-1-0"
    left.parent.mkdir()
    left.write_bytes(b"half")
    with Storage(tmp_path):
        assert not left.exists()


def test_a_directory_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot be created"):
        Storage(tmp_path / "file").open()
