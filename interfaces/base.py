"""What an interface may expect of the node, and the node of an interface.

Interfaces own sockets; ports own bookkeeping. An interface takes raw packets from its port's queue, frames them for its
medium, and hands every batch it receives back together with the port. Nothing here routes, and nothing polls.

Lock order: an interface's transmit lock, then the node's lock. No method of `Runtime` is called with the node's lock
held, and none that may lead back into `flush` with a transmit lock held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar, overload

from rnsfast.engine.port import Port
from rnsfast.errors import ConfigError

D = TypeVar("D")
T = TypeVar("T")

Address = tuple[int, Any]  # family, and the socket address as `socket.connect` takes it


class Handle(Protocol):
    """A deadline given to the runtime."""

    def cancel(self) -> None:
        """Idempotent; harmless when it has run."""


class Runtime(Protocol):
    """The node as an interface sees it. Unless said otherwise any thread may call, without the node's lock."""

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """The node's lock. Port attributes and queues change under it."""

    def now(self) -> float:
        """Monotonic seconds."""

    def watch(self, fd: int, events: int, callback: Callable[[int], None]) -> None:
        """Call `callback(events)` on the reactor thread whenever `fd` is ready for READ (1) or WRITE (2)."""

    def rewatch(self, fd: int, events: int) -> None:
        """Other events for a watched descriptor."""

    def unwatch(self, fd: int) -> None:
        """Stop watching; before the descriptor is closed."""

    def call_at(self, when: float, fn: Callable[[], None]) -> Handle:
        """Call `fn()` on the reactor thread at `when`, monotonic seconds; a moment in the past means soon."""

    def attach(self, port: Port, interface: Interface) -> None:
        """A port appears."""

    def detach(self, port: Port) -> None:
        """A port is gone for good."""

    def changed(self, port: Port) -> None:
        """`port.online` or `port.congested` changed."""

    def deliver(self, port: Port, packets: list[bytes]) -> None:
        """Hand over one batch of received raw packets. On the reactor thread, or on the thread that reads `port`."""

    def report(self, interface: Interface, message: str) -> None:
        """One sentence for the operator."""

    def resolve(self, host: str, port: int, callback: Callable[[list[Address] | OSError], None]) -> None:
        """Look `host` up away from the reactor; `callback(addresses or OSError)` runs on the reactor thread."""


class Interface(Protocol):
    """One configured interface, or one that was made by hand."""

    name: str
    kind: str  # the configuration's `type`

    @property
    def ports(self) -> list[Port]:
        """The ports that exist now: one, or one for each connection or peer."""

    def start(self, runtime: Runtime) -> None:
        """Open what can be opened now, without waiting for anybody. Raises InterfaceError; may be called again then."""

    def flush(self, port: Port) -> None:
        """Send what is in the port's queue in one go. Any thread, never with the node's lock held."""

    def close(self) -> None:
        """Send what is queued if the system takes it at once, then close. Idempotent, any thread."""

    def status(self) -> Mapping[str, Any]:
        """For `status`: what it is, in which state, since when."""


class Section(Protocol):
    """One section of the configuration file. Reading an option without a default makes it required.

    An empty value and the word `None` count as not set. Every error names file, line, section and option.
    """

    name: str

    @overload
    def text(self, key: str) -> str: ...
    @overload
    def text(self, key: str, default: D) -> str | D: ...

    @overload
    def integer(self, key: str, low: int | None = None, high: int | None = None) -> int: ...
    @overload
    def integer(self, key: str, low: int | None = None, high: int | None = None, *, default: D) -> int | D: ...

    @overload
    def number(self, key: str, low: float | None = None, high: float | None = None) -> float: ...
    @overload
    def number(self, key: str, low: float | None = None, high: float | None = None, *, default: D) -> float | D: ...

    @overload
    def boolean(self, key: str) -> bool: ...
    @overload
    def boolean(self, key: str, default: D) -> bool | D: ...

    def words(self, key: str) -> list[str]: ...

    @overload
    def choice(self, key: str, table: Mapping[str, T]) -> T: ...
    @overload
    def choice(self, key: str, table: Mapping[str, T], default: D) -> T | D: ...

    def fail(self, key: str, message: str) -> ConfigError: ...


class Decoder(Protocol):
    """Takes a byte stream apart into packets, in chunks of any size."""

    drops: Any  # Counter[Drop]

    def feed(self, chunk: memoryview, /) -> list[bytes]: ...


class Framing(Protocol):
    """How packets stand on a byte stream."""

    def encode(self, packet: bytes, /) -> bytes: ...
    def encode_many(self, packets: Iterable[bytes], /) -> bytes: ...
    def decoder(self, max_frame: int, /) -> Decoder: ...
