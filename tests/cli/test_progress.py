"""What is shown of a transfer, with a clock that tests move."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from rnsfast.cli.progress import BarDisplay, LineDisplay, Meter, NoDisplay, choose_display, size_text, time_text
from rnsfast.files import Progress


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1.0 kB"),
        (999_949, "999.9 kB"),
        (999_950, "1.0 MB"),
        (2e13, "20.0 TB"),
    ],
)
def test_sizes_are_in_decimal_units(size: float, text: str) -> None:
    assert size_text(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.123, "0.12 s"), (59.4, "59 s"), (59.6, "1:00 min"), (185, "3:05 min"), (7260, "2:01 h")]
)
def test_times_are_short(seconds: float, text: str) -> None:
    assert time_text(seconds) == text


def test_there_is_at_most_a_line_a_second_and_always_the_last() -> None:
    clock, stream = Clock(), io.StringIO()
    display = LineDisplay(stream, clock)
    for step in range(1001):
        clock.now = 100 + step * 0.0035  # 3.5 s in all
        display.show(Progress(step * 4000, 4_000_000))
    display.show(Progress(4_000_000, 4_000_000, confirmed=True))
    lines = stream.getvalue().splitlines()
    assert len(lines) == 4
    assert lines[0] == " 28 %   1.1 MB of 4.0 MB   1.1 MB/s   2.50 s left"
    assert lines[-1] == "100 %   4.0 MB of 4.0 MB"
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", stream.getvalue())


def test_all_sent_is_not_yet_all() -> None:
    clock, stream = Clock(), io.StringIO()
    display = LineDisplay(stream, clock)
    clock.now += 60  # looking for the receiver: counts for nothing
    display.show(Progress(0, None))
    clock.now += 2
    display.show(Progress(4_000_000, 4_000_000))
    assert stream.getvalue() == " 99 %   4.0 MB of 4.0 MB   2.0 MB/s\n"


def test_without_a_size_there_is_neither_a_percentage_nor_an_end() -> None:
    clock, stream = Clock(), io.StringIO()
    display = LineDisplay(stream, clock)
    clock.now += 60  # looking for the receiver: counts for nothing
    display.show(Progress(0, None))
    clock.now += 2
    display.show(Progress(5000, None))
    assert stream.getvalue() == "5.0 kB   2.5 kB/s\n"


def test_a_bar_goes_from_nothing_to_all() -> None:
    clock, stream = Clock(), io.StringIO()
    display = BarDisplay(Console(file=stream, force_terminal=True, width=80, height=20), clock)
    for step in range(11):
        clock.now += 0.2
        display.show(Progress(step * 100, 1000))
    display.show(Progress(1000, 1000, confirmed=True))
    display.close()
    percents = [int(found) for found in re.findall(r"(\d+) %", stream.getvalue())]
    assert percents == sorted(percents)
    assert percents[0] == 0 and percents[-1] == 100
    assert "500 bytes of 1.0 kB" in stream.getvalue()


def test_a_bar_is_not_drawn_more_often_than_the_eye_sees() -> None:
    clock, stream = Clock(), io.StringIO()
    display = BarDisplay(Console(file=stream, force_terminal=True, width=80, height=20), clock)
    for step in range(1000):
        clock.now += 0.001
        display.show(Progress(step, 1000))
    display.close()
    assert stream.getvalue().count(" of 1.0 kB") <= 13


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(0, 10**9)), max_size=50))
def test_a_rate_is_never_zero_and_never_absurd(steps: list[tuple[float, int]]) -> None:
    now, sent = 0.0, 0
    meter = Meter(now)
    for seconds, size in steps:
        now, sent = now + seconds, sent + size
        meter.update(sent, now)
        assert meter.rate is None or 0 < meter.rate <= 10**9 * len(steps) / 0.1


def test_a_stream_that_is_no_terminal_gets_lines() -> None:
    assert isinstance(choose_display(io.StringIO()), LineDisplay)
    assert isinstance(choose_display(io.StringIO(), wanted=False), NoDisplay)
