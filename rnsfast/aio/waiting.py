"""How asyncio waits for the engine: one future a waiter, resolved by the change it waits for."""

from __future__ import annotations

import asyncio
import inspect
import logging
import types
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any, Final

from rnsfast.node.waiting import Waitable

log = logging.getLogger(__name__)

Handler = Callable[..., Any]  # plain or async

HANDLER_PATIENCE: Final = 5.0  # seconds `Node.stop` waits for handlers before they are cancelled


def wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def bell(loop: asyncio.AbstractEventLoop) -> tuple[asyncio.Future[None], Callable[[], object]]:
    """A future of `loop`, and what resolves it from any thread."""
    waiter: asyncio.Future[None] = loop.create_future()
    return waiter, partial(loop.call_soon_threadsafe, wake, waiter)


async def until(waitable: Waitable, predicate: Callable[[], Any], timeout: float | None = None) -> bool:
    """Wait until `predicate()`, tested under the node's lock, is true. False if `timeout` seconds pass first."""
    loop = asyncio.get_running_loop()
    end = None if timeout is None else loop.time() + timeout
    while True:
        waiter, ring = bell(loop)
        with waitable._lock:
            if predicate():
                return True
            if end is not None and loop.time() >= end:
                return False
            waitable.watch(ring)
        timer = None if end is None else loop.call_at(end, wake, waiter)
        try:
            await waiter
        finally:
            with waitable._lock:
                waitable.unwatch(ring)
            if timer is not None:
                timer.cancel()


@types.coroutine
def let_others_run() -> Generator[None, None, None]:
    """One round of the loop."""
    yield


async def in_thread(fn: Callable[[], Any]) -> Any:
    """Run `fn` to its end in a thread, also if the caller is cancelled."""
    return await asyncio.shield(asyncio.ensure_future(asyncio.to_thread(fn)))


async def call(loop: asyncio.AbstractEventLoop, handler: Handler, *args: Any) -> Any:
    """What a handler returns; what it raises is logged. It runs in `loop`, its own."""
    try:
        if loop is not asyncio.get_running_loop():
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call(loop, handler, *args), loop))
        result = handler(*args)
        return await result if inspect.isawaitable(result) else result
    except Exception:
        log.exception("a handler raised; everything else goes on")
        return None


class Tasks:
    """The handlers that are running, or waiting for something to handle."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping: set[asyncio.Task[Any] | None] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` in the current loop."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def finish(self) -> None:
        """Wait for those of this loop, the callers of this excepted."""
        loop, me = asyncio.get_running_loop(), asyncio.current_task()
        self._stopping.add(me)
        try:
            others = [task for task in self._tasks if task.get_loop() is loop and task not in self._stopping]
            if others:
                _, late = await asyncio.wait(others, timeout=HANDLER_PATIENCE)
                for task in late:
                    task.cancel()
        finally:
            self._stopping.discard(me)
