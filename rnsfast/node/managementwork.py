"""The node's own errands: calls at their time, and work that may block, away from the reactor and outside the lock."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Protocol

from rnsfast.node.dispatch import Strand

if TYPE_CHECKING:
    from rnsfast.interfaces.base import Handle
    from rnsfast.node.reactor import Reactor

PROGRAM_TIMEOUT: Final = 10.0  # seconds for a program of the operator's to print its line
PROGRAM_OUTPUT: Final = 4096  # bytes of it that are read


class Work(Protocol):
    """What an errand may expect: the time, its turn, and a sign when to end."""

    @property
    def stopping(self) -> threading.Event:
        """Set when the node goes down: whatever takes long looks at it."""

    def now(self) -> float:
        """Monotonic seconds."""

    def unix_time(self) -> float:
        """What the engine takes for the time of day."""

    def run(self, errand: Callable[[], None]) -> None:
        """Have `errand` made soon, after those that wait already."""

    def run_at(self, when: float, errand: Callable[[], None]) -> Handle:
        """Have `errand` made at `when`, or as soon as its turn comes then."""

    def run_program(self, command: Sequence[str]) -> str:
        """The first line a program prints. Blocks. Raises OSError."""


class Errands:
    """One concern's errands, made one after the other on a callback thread. Different concerns do not wait for each
    other.

    Threads: all methods may be called from
    any thread, with or without the node's lock, but for `run_program`, which blocks.
    """

    def __init__(self, reactor: Reactor) -> None:
        self._reactor = reactor
        self._strand = Strand()
        self._lock = threading.Lock()
        self._program: subprocess.Popen[bytes] | None = None
        self.stopping = threading.Event()

    def now(self) -> float:
        """Monotonic seconds."""
        return self._reactor.now()

    def unix_time(self) -> float:
        """What the engine takes for the time of day."""
        return self._reactor.now() + self._reactor.engine.unix_offset

    def run(self, errand: Callable[[], None]) -> None:
        """Have `errand` made soon, after those that wait already."""
        if not self.stopping.is_set() and self._strand.append(lambda: self._make(errand)):
            self._reactor.dispatcher.submit(self._strand)

    def run_at(self, when: float, errand: Callable[[], None]) -> Handle:
        """Have `errand` made at `when`, or as soon as its turn comes then."""
        return self._reactor.call_at(when, lambda: self.run(errand))

    def _make(self, errand: Callable[[], None]) -> None:
        if not self.stopping.is_set():
            errand()

    def run_program(self, command: Sequence[str]) -> str:
        """The first line a program prints. It has no terminal and is ended after ten seconds, or when the node stops.

        Raises OSError: it cannot be started, failed, took too long or printed nothing.
        """
        with self._lock:
            if self.stopping.is_set():
                raise OSError("the node is stopping")
            program = self._program = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        late = threading.Timer(PROGRAM_TIMEOUT, _end, (program,))
        late.daemon = True
        late.start()
        try:
            assert program.stdout is not None
            with program.stdout:
                output = program.stdout.read(PROGRAM_OUTPUT)
            status = program.wait()
        finally:
            late.cancel()
            with self._lock:
                self._program = None
        if status != 0:
            raise OSError(f"{command[0]} ended with status {status}")
        lines = output.decode("utf-8", "replace").strip().splitlines()
        if not lines:
            raise OSError(f"{command[0]} printed nothing")
        return lines[0].strip()

    def stop(self) -> None:
        """Begin nothing more, end a program that runs. What is under way sees `stopping`. Idempotent."""
        self.stopping.set()
        with self._lock:
            program = self._program
        if program is not None:
            _end(program)


def _end(program: subprocess.Popen[bytes]) -> None:
    """With what it has started: that holds the other end of the pipe, too."""
    with suppress(OSError):
        if hasattr(os, "killpg"):
            os.killpg(program.pid, signal.SIGKILL)
        else:
            program.kill()
