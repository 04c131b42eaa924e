"""How far a transfer is, for people: a bar on a terminal, plain lines elsewhere, or nothing.

Nothing here has a timer or a thread: displays are told of progress and decide by the clock whether to show it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import IO, Any, Final, Protocol

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as Bar

from rnsfast.files.sender import Progress

LINE_EVERY: Final = 1.0  # seconds between plain lines, at least
BAR_EVERY: Final = 0.1  # seconds between redrawings, at least
RATE_OVER: Final = 5.0  # seconds; the rate shown is that of so much of the immediate past
UNITS: Final = ("bytes", "kB", "MB", "GB", "TB", "PB")


def size_text(size: float) -> str:
    """`999 bytes`, `1.0 kB`, `20.0 MB`: decimal units, as disks are sold."""
    unit = 0
    while size >= 999.95 and unit < len(UNITS) - 1:
        size /= 1000
        unit += 1
    return f"{size:.1f} {UNITS[unit]}" if unit else f"{size:.0f} {UNITS[0]}"


def time_text(seconds: float) -> str:
    """`0.42 s`, `59 s`, `3:05 min`, `2:00 h`."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02} h"


class Meter:
    """Rate and remaining time, from how far a transfer was at which moment."""

    def __init__(self, now: float) -> None:
        self._marks: deque[tuple[float, int]] = deque([(now, 0)])  # of the last RATE_OVER seconds

    def update(self, sent: int, now: float) -> None:
        """So much had been sent at `now`."""
        marks = self._marks
        if now - marks[-1][0] >= BAR_EVERY or len(marks) == 1:
            marks.append((now, sent))
        while len(marks) > 2 and marks[1][0] <= now - RATE_OVER:
            marks.popleft()

    @property
    def rate(self) -> float | None:
        """Bytes a second; None if nothing can be said yet."""
        (first, before), (last, after) = self._marks[0], self._marks[-1]
        return (after - before) / (last - first) if last - first >= BAR_EVERY and after > before else None

    def describe(self, progress: Progress) -> str:
        """`8.6 MB of 20.0 MB   5.1 MB/s   2 s left`."""
        parts = [size_text(progress.sent)]
        if progress.size is not None:
            parts[0] += f" of {size_text(progress.size)}"
        if (rate := self.rate) is not None and not progress.confirmed:
            parts.append(f"{size_text(rate)}/s")
            if progress.size is not None and progress.sent < progress.size:
                parts.append(f"{time_text((progress.size - progress.sent) / rate)} left")
        return "   ".join(parts)


class Display(Protocol):
    """Shows progress."""

    def show(self, progress: Progress) -> None: ...
    def close(self) -> None: ...


class NoDisplay:
    """Shows nothing."""

    def show(self, progress: Progress) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class _Paced:
    """Lets through what is due, and a confirmation always."""

    def __init__(self, every: float, clock: Callable[[], float]) -> None:
        self._every, self._clock = every, clock
        self._begun = False

    def is_due(self, progress: Progress) -> bool:
        now = self._clock()
        if not self._begun:  # time begins with the transfer, not with the search for the receiver
            self._begun = True
            self._meter = Meter(now)
            self._next = now + self._every
        self._meter.update(progress.sent, now)
        if now < self._next and not progress.confirmed:
            return False
        self._next = now + self._every
        return True


class LineDisplay(_Paced):
    """Plain lines, at most one a second, and one at the end. No control characters but the line's end."""

    def __init__(self, stream: IO[str], clock: Callable[[], float] = monotonic) -> None:
        super().__init__(LINE_EVERY, clock)
        self._stream = stream

    def show(self, progress: Progress) -> None:
        """Called as often as one likes."""
        if self.is_due(progress):
            fraction = progress.fraction
            percent = "" if fraction is None else f"{int(fraction * 100):3} %   "
            self._stream.write(f"{percent}{self._meter.describe(progress)}\n")
            self._stream.flush()

    def close(self) -> None:
        """Nothing is open."""


class BarDisplay(_Paced):
    """A bar, redrawn at most ten times a second; without a length if the size is not known."""

    def __init__(self, console: Console, clock: Callable[[], float] = monotonic) -> None:
        super().__init__(BAR_EVERY, clock)
        self._bar = Bar(
            TextColumn("{task.fields[percent]}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[note]}"),
            console=console,
            auto_refresh=False,
            redirect_stdout=False,
            expand=True,
        )
        self._task: TaskID | None = None

    def show(self, progress: Progress) -> None:
        """Called as often as one likes."""
        due = self.is_due(progress)
        fraction = progress.fraction
        shown: dict[str, Any] = {
            "total": None if fraction is None else 1.0,
            "completed": fraction or 0.0,
            "percent": "" if fraction is None else f"{int(fraction * 100):3} %",
            "note": self._meter.describe(progress),
        }
        if self._task is None:
            self._task = self._bar.add_task("", **shown)
            self._bar.start()
        elif due:
            self._bar.update(self._task, refresh=True, **shown)

    def close(self) -> None:
        """Leave the bar as it is and go to the next line."""
        self._bar.stop()


def choose_display(stream: IO[str], *, wanted: bool = True) -> Display:
    """A bar if `stream` is a terminal that can show one, else lines."""
    if not wanted:
        return NoDisplay()
    console = Console(file=None, stderr=True) if stream.isatty() else None
    if console is None or not console.is_terminal or console.is_dumb_terminal:
        return LineDisplay(stream)
    return BarDisplay(console)
