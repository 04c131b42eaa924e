"""Runs application callbacks: in order along a strand, several strands at once, never under the node's lock.

A strand is a queue of calls, one for each link and one for everything else.  Threads are made when all are busy, up to
MAX_THREADS, so a callback that blocks holds up its own link only; a thread that has had nothing to do for IDLE seconds
ends, the last one excepted.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Final

log = logging.getLogger(__name__)

MAX_THREADS: Final = 64
IDLE: Final = 30.0  # seconds
BATCH: Final = 64  # calls of a strand made in a row before another strand gets the thread

Call = Callable[[], None]


class Strand:
    """Calls made one after the other."""

    __slots__ = ("calls", "lock", "submitted")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.calls: deque[Call] = deque()  # bounded by what its link may hold: each call stands for counted bytes
        self.submitted = False

    def append(self, call: Call) -> bool:
        """Queue a call. True if the strand must now be submitted: it is in nobody's hands."""
        with self.lock:
            self.calls.append(call)
            if self.submitted:
                return False
            self.submitted = True
            return True


class Dispatcher:
    """The threads."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[Strand | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._idle = 0
        self._pending = 0  # strands in the queue
        self._closed = False
        self._serial = 0

    def submit(self, strand: Strand) -> None:
        """Run the strand's calls soon. Any thread."""
        with self._lock:
            if self._closed:
                return
            self._pending += 1
            if self._pending > self._idle and len(self._threads) < MAX_THREADS:
                self._start()
            self._queue.put(strand)  # under the lock: before the marks that end the threads, or not at all

    def _start(self) -> None:
        self._serial += 1
        thread = threading.Thread(target=self._run, name=f"{self._name}-callbacks-{self._serial}", daemon=True)
        self._threads.add(thread)
        self._idle += 1
        thread.start()

    def _run(self) -> None:
        me = threading.current_thread()
        while True:
            try:
                strand = self._queue.get(timeout=IDLE)
            except Empty:
                with self._lock:
                    if self._pending or (len(self._threads) == 1 and not self._closed):
                        continue
                    self._idle -= 1
                    self._threads.discard(me)
                return
            if strand is None:
                break
            with self._lock:
                self._pending -= 1
                self._idle -= 1
            while self._make_calls(strand) and not self._pass_on(strand):
                pass  # the dispatcher is closing: what was queued before still runs
            with self._lock:
                self._idle += 1
        with self._lock:
            self._idle -= 1
            self._threads.discard(me)

    def _pass_on(self, strand: Strand) -> bool:
        """Let others have the thread first. False once the threads are ending."""
        with self._lock:
            if self._closed:
                return False
            self._pending += 1
            self._queue.put(strand)
            return True

    def _make_calls(self, strand: Strand) -> bool:
        """Make up to BATCH calls. True if there are more."""
        calls = strand.calls
        for _ in range(BATCH):
            try:
                call = calls.popleft()
            except IndexError:
                break
            try:
                call()
            except BaseException:  # SystemExit too: it would end this thread, and with it the strand
                log.exception("an application callback raised; everything else goes on")
        with strand.lock:
            strand.submitted = bool(calls)
            return strand.submitted

    def is_mine(self, thread: threading.Thread) -> bool:
        """Whether `thread` runs callbacks."""
        return thread in self._threads

    def close(self, timeout: float) -> None:
        """End the threads once what is queued has run; waits up to `timeout` seconds, never for the calling thread."""
        with self._lock:
            self._closed = True
            threads = list(self._threads)
        for _ in threads:
            self._queue.put(None)
        end = monotonic() + timeout
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, end - monotonic()))
