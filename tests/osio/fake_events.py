"""Event objects of Windows for the fakes: they block for real, but never longer than a test may take."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

PATIENCE = 10.0  # seconds after which a wait without a limit has failed


class FakeEvents:
    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.events: dict[int, tuple[bool, bool]] = {}  # handle: (manual, set)
        self.closed: set[int] = set()
        self.next_handle = 100
        self.waits: list[tuple[int, ...]] = []
        self.waiting = threading.Event()  # somebody is about to block
        self.before_wait: list[Callable[[], None]] = []  # one each wait
        self.log: list[str] = []

    def new_handle(self) -> int:
        self.next_handle += 4
        return self.next_handle

    def create_event(self, manual: bool) -> int:
        with self.changed:
            handle = self.new_handle()
            self.events[handle] = (manual, False)
            return handle

    def set_event(self, handle: int) -> None:
        with self.changed:
            assert handle in self.events, f"set_event on handle {handle}, which is not open"
            self.events[handle] = (self.events[handle][0], True)
            self.changed.notify_all()

    def reset(self, handle: int) -> None:
        with self.changed:
            self.events[handle] = (self.events[handle][0], False)

    def close_handle(self, handle: int) -> None:
        with self.changed:
            assert handle in self.events, f"handle {handle} is not open"
            del self.events[handle]
            self.closed.add(handle)

    def check_wait(self, handles: tuple[int, ...]) -> None:
        """A fake's own rules about waiting."""

    def wait_any(self, handles: tuple[int, ...], milliseconds: int | None) -> int:
        self.check_wait(handles)
        if milliseconds != 0:
            self.waits.append(handles)
            if self.before_wait:
                self.before_wait.pop(0)()
        end = time.monotonic() + (PATIENCE if milliseconds is None else milliseconds / 1000)
        with self.changed:
            while True:
                for index, handle in enumerate(handles):
                    assert handle in self.events, f"handle {handle} was closed under who waits for it"
                    manual, is_set = self.events[handle]
                    if is_set:
                        self.events[handle] = (manual, manual)
                        return index
                left = end - time.monotonic()
                if left <= 0:
                    assert milliseconds is not None, "waited for ever"
                    return -1
                self.waiting.set()
                self.changed.wait(left)
