"""The listening end of a stream interface: a port for every connection.  Protocol 06, 1.7, 4.2 and 5.

The listener itself has no port: packets flow over the connections. A connection's port is attached before its first
byte is read and detached when the connection ends.
"""

from __future__ import annotations

import errno
import logging
import socket
import threading
from dataclasses import dataclass
from typing import Any, Final, Protocol

from rnsfast.engine.port import Port
from rnsfast.interfaces.base import Handle, Runtime
from rnsfast.interfaces.common import CommonConfig, Medium, bracketed, ifac_key, make_port
from rnsfast.interfaces.framing import HDLC
from rnsfast.interfaces.sockets import bind_failure, code, device_address, listen_addresses, open_listener, tune
from rnsfast.interfaces.stream import End, StreamConnection, receive_buffer
from rnsfast.osio.poller import READ

log = logging.getLogger(__name__)

BACKLOG: Final = 128  # connections the system completes for us; local
ACCEPTS: Final = 64  # connections an event; the rest is reported again at once
PAUSE: Final = 1.0  # seconds without accepting when the process is out of descriptors

_EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerSettings:
    """What the types that listen have in common."""

    kind: str  # the configuration's `type`
    spawned: str  # class name in the display of a connection
    common: CommonConfig
    medium: Medium
    host: str | None
    port: int
    device: str | None = None  # wins over host
    prefer_ipv6: bool = False
    i2p_tunneled: bool = False


@dataclass(slots=True)
class _Entry:
    connection: StreamConnection
    host: str  # of the other side
    attached: bool = False  # until then whoever attaches the port also detaches it


class Doorkeeper(Protocol):
    """Decides who may connect. On the reactor thread."""

    def admits(self, host: str, now: float) -> bool: ...
    def ended(self, host: str, lasted: float, now: float) -> None: ...


class StreamListener:
    """Accepts, as long as it is open."""

    def __init__(self, settings: ListenerSettings, *, doorkeeper: Doorkeeper | None = None) -> None:
        self.settings = settings
        self.name, self.kind = settings.common.name, settings.kind
        self.title = f"{settings.kind}[{self.name}]"
        self.accepted = 0
        self.refused = 0  # by the doorkeeper
        self._doorkeeper = doorkeeper
        self._ifac = ifac_key(settings.common, settings.medium)
        self._buffer = receive_buffer()
        self._runtime: Runtime | None = None
        self._lock = threading.Lock()  # listener and table of connections
        self._listener: socket.socket | None = None
        self._bound = settings.host or ""
        self._since = 0.0
        self._connections: dict[int, _Entry] = {}  # by id(port)
        self._resume: Handle | None = None
        self._exhausted = False  # reported; until a connection is accepted again
        self._closed = False

    @property
    def ports(self) -> list[Port]:
        with self._lock:
            return [entry.connection.port for entry in self._connections.values()]

    @property
    def address(self) -> Any:
        """Where it listens, as the system says; None before `start` and after `close`."""
        listener = self._listener
        return None if listener is None else listener.getsockname()

    @property
    def display(self) -> str:
        """`TCPServerInterface[NAME/IP:PORT]`."""
        return f"{self.kind}[{self.name}/{bracketed(self._bound, self.settings.port)}]"

    def start(self, runtime: Runtime) -> None:
        """Bind and listen. Raises InterfaceError, and may then be called again."""
        listener = self.bind()
        with self._lock:
            if self._closed:
                listener.close()
                return
            self._runtime, self._listener = runtime, listener
            self._since = runtime.now()
            runtime.watch(listener.fileno(), READ, self._on_acceptable)

    def bind(self) -> socket.socket:
        """A listening, non-blocking socket. Raises InterfaceError. For other address families."""
        settings = self.settings
        host = settings.host or ""
        try:
            if settings.device is not None:
                host = device_address(settings.device, prefer_ipv6=settings.prefer_ipv6)
            addresses = listen_addresses(host, settings.port, prefer_ipv6=settings.prefer_ipv6)
        except OSError as error:
            if settings.device is not None:
                raise self._device_failure(settings.device, error) from error
            raise bind_failure(self.title, bracketed(host, settings.port), error) from error
        self._bound = host
        try:
            return open_listener(*addresses[0], BACKLOG)
        except (OSError, OverflowError) as error:
            cause = error if isinstance(error, OSError) else OSError(errno.EINVAL, str(error))
            raise bind_failure(self.title, bracketed(host, settings.port), cause) from error

    def _device_failure(self, device: str, error: OSError) -> Exception:
        failure = bind_failure(self.title, f"device {device}", error)
        if error.errno == errno.ENODEV:
            return type(failure)(f"{self.title}: there is no network device {device}", retryable=True)
        return type(failure)(f"{self.title}: device {device}: {error.strerror}", retryable=error.errno != errno.ENOSYS)

    # -- the reactor's calls --------------------------------------------------------------------------------------

    def _on_acceptable(self, events: int) -> None:
        for _ in range(ACCEPTS):
            listener = self._listener
            if listener is None:
                return
            try:
                sock, address = self.accept(listener)
            except BlockingIOError:
                return
            except OSError as error:
                if self._listener is None:
                    return
                if error.errno in _EXHAUSTED:
                    self._pause(error)
                    return
                log.debug("%s: a connection ended before it was accepted: %s", self.title, code(error))
                continue
            self._exhausted = False
            self._spawn(sock, address)

    def accept(self, listener: socket.socket) -> tuple[socket.socket, Any]:
        return listener.accept()

    def _pause(self, error: OSError) -> None:
        """The connection stays in the system's queue and would be reported for ever: look again in a second."""
        runtime = self._runtime
        assert runtime is not None
        with self._lock:
            if self._listener is None:
                return
            runtime.rewatch(self._listener.fileno(), 0)
            self._resume = runtime.call_at(runtime.now() + PAUSE, self._go_on)
            first, self._exhausted = not self._exhausted, True
        if first:
            runtime.report(self, f"{self.title}: cannot accept connections: {code(error)}; trying every second")

    def _go_on(self) -> None:
        with self._lock:
            self._resume = None
            if self._listener is not None:
                assert self._runtime is not None
                self._runtime.rewatch(self._listener.fileno(), READ)

    def _spawn(self, sock: socket.socket, address: Any) -> None:
        runtime, settings = self._runtime, self.settings
        assert runtime is not None
        host, label = self.remote(sock, address)
        if self._doorkeeper is not None and not self._doorkeeper.admits(host, runtime.now()):
            self.refused += 1
            sock.close()
            return
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            tune(sock, i2p=settings.i2p_tunneled)
        display = f"{settings.spawned}[Client on {self.name}/{label}]"
        port = make_port(display, settings.common, settings.medium, self._ifac)
        port.online = True
        connection = StreamConnection(
            runtime, port, sock, HDLC, self._buffer, self._on_end, batch=settings.common.batch
        )
        with self._lock:
            if self._listener is None:
                connection.close()
                return
            entry = self._connections[id(port)] = _Entry(connection, host)
            self.accepted += 1
        runtime.attach(port, self)
        with self._lock:
            entry.attached = id(port) in self._connections
        if entry.attached:
            connection.watch()
        else:  # closed meanwhile
            runtime.detach(port)

    def remote(self, sock: socket.socket, address: Any) -> tuple[str, str]:
        """The remote host, and HOST:PORT for the display of the connection. For other address families."""
        return str(address[0]), bracketed(str(address[0]), address[1])

    def _on_end(self, connection: StreamConnection, end: End) -> None:
        runtime = self._runtime
        assert runtime is not None
        with self._lock:
            entry = self._connections.pop(id(connection.port), None)
        if entry is None:
            return
        log.debug("%s: %s: %s", self.title, connection.port.name, end)
        with runtime.lock:
            connection.port.online = False
        runtime.detach(connection.port)
        if self._doorkeeper is not None:
            now = runtime.now()
            self._doorkeeper.ended(entry.host, now - connection.since, now)

    # -- any thread -----------------------------------------------------------------------------------------------

    def flush(self, port: Port) -> None:
        entry = self._connections.get(id(port))
        if entry is not None:
            entry.connection.flush()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            listener, self._listener = self._listener, None
            if listener is None:
                return
            assert self._runtime is not None
            self._runtime.unwatch(listener.fileno())
            listener.close()
            resume, self._resume = self._resume, None
            entries = list(self._connections.values())
            self._connections = {}
        if resume is not None:
            resume.cancel()
        for entry in entries:
            entry.connection.close()
            with self._runtime.lock:
                entry.connection.port.online = False
            if entry.attached:
                self._runtime.detach(entry.connection.port)

    def status(self) -> dict[str, Any]:
        with self._lock:
            entries = list(self._connections.values())
        runtime = self._runtime
        listening = self._listener is not None
        return {
            "type": self.kind,
            "name": self.name,
            "display": self.display,
            "state": "listening" if listening else "closed",
            "state_for": runtime.now() - self._since if listening and runtime is not None else 0.0,  # seconds
            "accepted": self.accepted,
            "refused": self.refused,
            "connections": {entry.connection.port.name: entry.connection.status() for entry in entries},
        }
