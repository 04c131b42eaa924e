"""File names: what is offered, what is taken."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rnsfast.files.names import SAVED_BYTES, name_fault, numbered, proper_name, shorten

HOSTILE = [
    "", ".", "..", "/", "../x", "..\\x", "/etc/passwd", "a/b", "a\\b", "C:\\x", "a\0b", "a\nb", "\x1b[2J", "a\x7f",
    " a", "a ", "\ta", "x" * 201, "é" * 101, ".rnsfast-0123456789abcdef.part",
]  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_that_could_do_harm_is_refused(name: str) -> None:
    assert name_fault(name) is not None


@pytest.mark.parametrize(
    "name", ["a", "report.pdf", ".bashrc", "x" * 200, "é" * 100, "a b (1).tar.gz", "...", "日本語"]
)
def test_an_ordinary_name_is_taken(name: str) -> None:
    assert name_fault(name, windows=False) is None


@pytest.mark.parametrize("name", ["con", "CON.txt", "Lpt1", "com¹.log", "nul .x", "a:b", "a?", "a.", "CONIN$"])
def test_a_name_that_windows_gives_another_meaning_is_refused_there(name: str) -> None:
    assert name_fault(name, windows=True) is not None
    assert name_fault(name, windows=False) is None


@given(st.text())
@example("\ud800x")
@example("a" * 190 + "." + "b" * 30)
@example("/tmp/.rnsfast-1.part")
def test_what_is_offered_can_always_be_taken(path: str) -> None:
    assert name_fault(proper_name(path), windows=False) is None


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/tmp/a.bin", "a.bin"),
        ("dir/", "dir"),
        ("a\\b", "a_b"),
        ("a\nb", "a_b"),
        ("..", "file"),
        ("", "file"),
        ("x" * 300 + ".pdf", "x" * 196 + ".pdf"),
        ("x." + "y" * 300, "x." + "y" * 198),
    ],
)
def test_a_name_is_made_from_the_last_part_of_a_path(path: str, name: str) -> None:
    assert proper_name(path) == name


def test_a_number_goes_before_the_suffix() -> None:
    assert numbered("report.pdf", 0) == "report.pdf"
    assert numbered("report.pdf", 1) == "report (1).pdf"
    assert numbered("report", 12) == "report (12)"
    assert numbered(".bashrc", 1) == ".bashrc (1)"


@given(st.text(min_size=1, max_size=200), st.integers(1, 9999))
def test_a_numbered_name_fits_and_stays_a_name(text: str, number: int) -> None:
    name = proper_name(text)
    assert len(numbered(name, number).encode()) <= SAVED_BYTES
    assert "/" not in numbered(name, number)


@given(st.text(), st.integers(0, 50))
def test_shortening_cuts_between_characters(text: str, limit: int) -> None:
    short = shorten(text, limit)
    assert len(short.encode()) <= limit
