"""Files while they arrive."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from rnsfast.files import store
from rnsfast.files.errors import NotStored
from rnsfast.files.store import PartFile, remove_abandoned


def kept(directory: Path, name: str, data: bytes = b"new") -> str:
    part = PartFile(directory)
    part.write(data)
    return part.keep(name)


def test_nothing_stands_under_its_name_before_it_is_kept(tmp_path: Path) -> None:
    part = PartFile(tmp_path)
    part.write(b"abc")
    (name,) = os.listdir(tmp_path)
    assert name.startswith(".rnsfast-") and name.endswith(".part")
    assert part.keep("a.bin") == "a.bin"
    assert os.listdir(tmp_path) == ["a.bin"]
    assert (tmp_path / "a.bin").read_bytes() == b"abc"


def test_a_discarded_file_leaves_nothing(tmp_path: Path) -> None:
    part = PartFile(tmp_path)
    part.write(b"abc")
    part.discard()
    part.discard()
    assert os.listdir(tmp_path) == []


def test_a_file_of_the_same_name_stays_and_the_new_one_gets_a_number(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"old")
    assert kept(tmp_path, "a.bin") == "a (1).bin"
    assert kept(tmp_path, "a.bin") == "a (2).bin"
    assert (tmp_path / "a.bin").read_bytes() == b"old"


def test_a_symbolic_link_of_that_name_is_not_followed(tmp_path: Path) -> None:
    inbox, outside = tmp_path / "in", tmp_path / "outside"
    inbox.mkdir()
    (inbox / "a").symlink_to(outside)  # dangling: opening it for writing would make the file outside
    assert kept(inbox, "a") == "a (1)"
    assert not outside.exists()


def test_a_directory_of_that_name_is_not_entered(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    assert kept(tmp_path, "a") == "a (1)"
    assert os.listdir(tmp_path / "a") == []


def test_a_file_system_without_hard_links_replaces_nothing_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "not permitted")

    monkeypatch.setattr(os, "link", refuse)
    (tmp_path / "a").write_bytes(b"old")
    assert kept(tmp_path, "a") == "a (1)"
    assert sorted(os.listdir(tmp_path)) == ["a", "a (1)"]
    assert (tmp_path / "a").read_bytes() == b"old"
    assert (tmp_path / "a (1)").read_bytes() == b"new"


def test_the_mode_is_that_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"")
    kept(tmp_path, "a")
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == stat.S_IMODE((tmp_path / "other").stat().st_mode)


def test_too_many_files_of_one_name_are_an_error_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "MAX_NUMBER", 1)
    kept(tmp_path, "a")
    kept(tmp_path, "a")
    with pytest.raises(NotStored, match="1 files of that name"):
        kept(tmp_path, "a")
    assert sorted(os.listdir(tmp_path)) == ["a", "a (1)"]


def test_a_directory_that_is_gone_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(NotStored, match=r"^the directory is not there any more$"):
        PartFile(tmp_path / "gone")


def test_leftovers_of_a_killed_program_are_removed_and_files_in_use_are_not(tmp_path: Path) -> None:
    (tmp_path / ".rnsfast-dead.part").write_bytes(b"half")
    (tmp_path / "other.part").write_bytes(b"not ours")
    part = PartFile(tmp_path)
    assert remove_abandoned(tmp_path) == [".rnsfast-dead.part"]
    part.write(b"goes on")
    assert part.keep("a") == "a"
    assert sorted(os.listdir(tmp_path)) == ["a", "other.part"]


@pytest.mark.parametrize(
    ("number", "sentence"),
    [
        (errno.ENOSPC, "the disk is full"),
        (errno.EDQUOT, "the disk quota is used up"),
        (errno.EROFS, "the directory cannot be written to"),
        (errno.EIO, "the file cannot be written: input/output error"),
    ],
)
def test_what_the_file_system_says_becomes_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, sentence: str
) -> None:
    part = PartFile(tmp_path)

    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", fail)
        with pytest.raises(NotStored, match=f"^{sentence}$"):
            part.write(b"x")
    part.discard()
    assert os.listdir(tmp_path) == []
