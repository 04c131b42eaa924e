"""Log lines of the commands."""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rnsfast.node.logs import LEVELS, LineFormatter, LogFile, python_level, set_up, take_down
from tests.vectors_support import Case, vectors

log = logging.getLogger("rnsfast.node.test")


@pytest.fixture(autouse=True)
def restore() -> Iterator[None]:
    """Leave the logging of the test run as it was."""
    root = logging.getLogger("rnsfast")
    before = list(root.handlers), root.level, root.propagate
    yield
    root.handlers, root.level, root.propagate = list(before[0]), before[1], before[2]


def record(level: int, text: str = "msg") -> logging.LogRecord:
    made = logging.LogRecord("rnsfast", LEVELS[level], "", 0, text, None, None)
    made.created = vectors("node", "fixed_time")
    return made


@pytest.mark.parametrize("case", vectors("node", "log_lines_utc"), ids=lambda case: str(case["level"]))
def test_lines_look_as_operators_know_them(case: Case) -> None:
    for name, formatter in {
        "default": LineFormatter(),
        "no_timestamp": LineFormatter(timestamps=False),
        "compact": LineFormatter(tags=False),
    }.items():
        formatter.converter = time.gmtime
        assert formatter.format(record(case["level"])) == case[name]


def test_levels_keep_their_order_and_stay_in_range() -> None:
    numbers = [python_level(level) for level in range(-1, 9)]
    assert numbers == sorted(numbers, reverse=True) and len(set(numbers)) == 10
    assert python_level(99) == python_level(8)


def test_a_level_shows_itself_and_what_is_more_important() -> None:
    stream = io.StringIO()
    set_up(3, timestamps=False, stream=stream)
    log.info("hidden")
    log.warning("%s: seen", "tcp")
    assert stream.getvalue() == "[Warning]  tcp: seen\n"


def test_setting_up_again_replaces_and_taking_down_restores() -> None:
    first, second = io.StringIO(), io.StringIO()
    set_up(4, stream=first)
    handler = set_up(-1, stream=second)
    log.critical("nobody")
    take_down(handler)
    log.critical("nobody")
    assert first.getvalue() == second.getvalue() == ""
    assert logging.getLogger("rnsfast").propagate


def test_names_from_the_network_cannot_forge_lines() -> None:
    line = LineFormatter(timestamps=False).format(record(4, "a\n[Error] \x1b[31mb"))
    assert line == "[Info]     a\\x0a[Error] \\x1b[31mb"


def test_a_traceback_follows_its_line() -> None:
    stream = io.StringIO()
    set_up(4, timestamps=False, stream=stream)
    try:
        raise ValueError("why")
    except ValueError:
        log.exception("callback failed")
    lines = stream.getvalue().splitlines()
    assert lines[0] == "[Error]    callback failed" and lines[-1] == "ValueError: why"


def test_a_long_log_file_becomes_the_previous_one(tmp_path: Path) -> None:
    path = tmp_path / "logfile"
    handler = LogFile(path, io.StringIO(), limit=20)
    handler.setFormatter(LineFormatter(timestamps=False))
    for text in ("one", "two", "three"):
        handler.handle(record(4, text))
    assert Path(f"{path}.1").read_text() == "[Info]     one\n[Info]     two\n"
    assert path.read_text() == "[Info]     three\n"


def test_a_log_file_that_cannot_be_written_goes_to_the_console_for_good(tmp_path: Path) -> None:
    console = io.StringIO()
    set_up(4, timestamps=False, file=tmp_path, stream=console)
    log.info("one")
    log.info("two")
    lines = console.getvalue().splitlines()
    assert "cannot be written (Is a directory)" in lines[0]
    assert lines[1:] == ["[Info]     one", "[Info]     two"]


def test_a_closed_console_harms_nothing(tmp_path: Path) -> None:
    console = io.StringIO()
    console.close()
    set_up(4, file=tmp_path, stream=console)
    log.info("nowhere to go")
