"""How far a transfer is: a bar on a terminal, plain lines elsewhere, nothing if so wished."""

from __future__ import annotations

import sys
from time import monotonic
from typing import Final, Protocol, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

LINE_EVERY: Final = 1.0  # seconds between plain lines, at least
DRAW_EVERY: Final = 0.1  # seconds between drawings of the bar, at least


class Display(Protocol):
    """Calls come from one thread; the fraction never falls."""

    def show(self, done: int, total: int | None) -> None: ...
    def end(self, *, complete: bool) -> None: ...


class Nothing:
    """For --no-progress."""

    def show(self, done: int, total: int | None) -> None:
        """Nothing."""

    def end(self, *, complete: bool) -> None:
        """Nothing."""


class Bar:
    """A bar with rate and time left. Drawn when there is news; no thread of its own."""

    def __init__(self, label: str, stream: TextIO) -> None:
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(file=stream),
            auto_refresh=False,
        )
        self._label = label
        self._task: TaskID | None = None
        self._next = 0.0

    def show(self, done: int, total: int | None) -> None:
        """At most ten times a second."""
        if self._task is None:
            self._progress.start()
            self._task = self._progress.add_task(self._label, total=total)
        if monotonic() >= self._next:
            self._next = monotonic() + DRAW_EVERY
            self._progress.update(self._task, completed=done, total=total, refresh=True)

    def end(self, *, complete: bool) -> None:
        """Full if and only if the transfer is complete."""
        if self._task is not None:
            if complete:
                task = self._progress.tasks[0]
                total = task.total if task.total is not None else task.completed
                self._progress.update(self._task, completed=total, total=total, refresh=True)
            self._progress.stop()


class Lines:
    """`send a.bin: 12,345,678 of 20,000,000 bytes, 61 %, 84.1 MB/s`, at most one a second, no control characters."""

    def __init__(self, label: str, stream: TextIO) -> None:
        self._label, self._stream = label, stream
        self._began = monotonic()
        self._next = self._began + LINE_EVERY

    def show(self, done: int, total: int | None) -> None:
        """If a second has passed since the last line."""
        now = monotonic()
        if now < self._next:
            return
        self._next = now + LINE_EVERY
        rate = done / max(now - self._began, 1e-3) / 1e6
        of = f" of {total:,} bytes, {100 * done // total} %" if total else " bytes"
        print(f"{self._label}: {done:,}{of}, {rate:.1f} MB/s", file=self._stream, flush=True)

    def end(self, *, complete: bool) -> None:
        """The command prints the summary."""


def display(label: str, *, wanted: bool = True, stream: TextIO | None = None) -> Display:
    """What fits the stream, standard error by default."""
    stream = sys.stderr if stream is None else stream
    if not wanted:
        return Nothing()
    return Bar(label, stream) if stream.isatty() else Lines(label, stream)
