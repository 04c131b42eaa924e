"""The connecting end of a stream interface: one port for ever, one connection at a time.  Protocol 06, 4.1 and 5.

    resolving -> connecting (address by address) -> online -> waiting -> resolving -> …

Nothing here blocks and nothing polls: every wait is a deadline or a watched descriptor. Everything but `flush`,
`status` and `close` runs on the reactor thread.
"""

from __future__ import annotations

import errno
import logging
import random
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from rnsfast.engine.port import Port
from rnsfast.interfaces.base import Address, Framing, Handle, Runtime
from rnsfast.interfaces.common import CommonConfig, Medium, bracketed, ifac_key, make_port
from rnsfast.interfaces.framing import HDLC
from rnsfast.interfaces.sockets import code, preferred, tune
from rnsfast.interfaces.stream import Cause, End, StreamConnection, receive_buffer
from rnsfast.osio.poller import WRITE
from rnsfast.wire.drop import Drop

log = logging.getLogger(__name__)

RECONNECT_WAIT: Final = 5.0  # seconds; peers count on a quick return, so it does not grow
RECONNECT_JITTER: Final = 1.0  # seconds at most, so that a restarted server is not met by all at once
STALLED_WAIT_LIMIT: Final = 60.0  # seconds; the wait doubles up to this while a peer connects but takes nothing
REPORT_INTERVAL: Final = 60.0  # seconds between reports of an outage, however often the connection comes and goes
CONNECT_TIMEOUT: Final = 5.0  # seconds for one address

_IN_PROGRESS: Final = frozenset({errno.EINPROGRESS, errno.EWOULDBLOCK, errno.EALREADY, errno.EINTR})


class State(Enum):
    IDLE = "not started"
    RESOLVING = "resolving"
    CONNECTING = "connecting"
    ONLINE = "online"
    WAITING = "waiting for the next try"
    GIVEN_UP = "given up"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings:
    """What the types that connect have in common."""

    kind: str  # the configuration's `type`
    display: str  # name and hash of the port
    common: CommonConfig
    medium: Medium
    host: str
    port: int
    framing: Framing = HDLC
    wants_tunnel: bool = True
    i2p_tunneled: bool = False
    prefer_ipv6: bool | None = None  # None: in the order of the resolver
    connect_timeout: float = CONNECT_TIMEOUT
    max_reconnect_tries: int | None = None  # None: no limit
    reconnect_wait: float = RECONNECT_WAIT


def _jitter() -> float:
    return random.random() * RECONNECT_JITTER


class StreamClient:
    """Connects, and connects again; the port goes online and offline and stays the same."""

    def __init__(self, settings: ClientSettings, *, jitter: Callable[[], float] = _jitter) -> None:
        self.settings = settings
        self.name, self.kind = settings.common.name, settings.kind
        self.target = bracketed(settings.host, settings.port)
        self.title = f"{settings.kind}[{self.name}]"
        ifac = ifac_key(settings.common, settings.medium)
        self.port: Port = make_port(settings.display, settings.common, settings.medium, ifac)
        self.port.wants_tunnel = settings.wants_tunnel
        self.connects = 0  # connections that came about
        self._jitter = jitter
        self._buffer = receive_buffer()
        self._runtime: Runtime | None = None
        # The lock orders the reactor's steps and `close`. It is held for no call that may lead back here.
        self._lock = threading.Lock()
        self._state = State.IDLE
        self._since = 0.0
        self._addresses: list[Address] = []
        self._socket: socket.socket | None = None  # the one that is connecting
        self._connection: StreamConnection | None = None
        self._deadline: Handle | None = None  # of the connection attempt, or the next try
        self._tries = 0  # since the last time online
        self._stalls = 0  # ends by stalling since a connection took everything
        self._last_error = ""
        self._reported = False  # this outage was
        self._quiet_until = 0.0  # monotonic seconds

    @property
    def ports(self) -> list[Port]:
        return [self.port]

    @property
    def state(self) -> State:
        return self._state

    def start(self, runtime: Runtime) -> None:
        """Attach the port and begin to connect. Never fails: an unreachable target is tried again."""
        self._runtime = runtime
        runtime.attach(self.port, self)
        self._attempt()

    # -- connecting -----------------------------------------------------------------------------------------------

    def _enter(self, state: State) -> None:
        if state is not self._state:
            self._state = state
            self._since = self._now()

    def _now(self) -> float:
        assert self._runtime is not None
        return self._runtime.now()

    def _attempt(self) -> None:
        with self._lock:
            if self._state is State.CLOSED:
                return
            self._deadline = None
            self._enter(State.RESOLVING)
        self.look_up(self._on_resolved)

    def look_up(self, callback: Callable[[list[Address] | OSError], None]) -> None:
        """Find out where to connect to. For other address families."""
        assert self._runtime is not None
        self._runtime.resolve(self.settings.host, self.settings.port, callback)

    def _on_resolved(self, answer: list[Address] | OSError) -> None:
        if isinstance(answer, OSError):
            self._failed(code(answer))
            return
        prefer = self.settings.prefer_ipv6
        self._addresses = list(answer) if prefer is None else preferred(answer, prefer_ipv6=prefer)
        if not self._addresses:
            self._last_error = "the name has no address"
        self._try_next()

    def _try_next(self) -> None:
        """Begin to connect to the next address; when there is none left, wait for the next try."""
        runtime = self._runtime
        assert runtime is not None
        while True:
            with self._lock:
                if self._state is State.CLOSED:
                    return
                address = self._addresses.pop(0) if self._addresses else None
                if address is not None:
                    self._enter(State.CONNECTING)
                    try:
                        sock = socket.socket(address[0], socket.SOCK_STREAM)
                        sock.setblocking(False)
                    except OSError as error:
                        self._last_error = code(error)
                        continue
                    if address[0] in (socket.AF_INET, socket.AF_INET6):
                        tune(sock, i2p=self.settings.i2p_tunneled)
                    try:
                        failure = sock.connect_ex(address[1])
                    except (OSError, OverflowError) as error:  # an address the system cannot even read
                        failure = getattr(error, "errno", None) or errno.EINVAL
                    if failure == 0 or failure in _IN_PROGRESS:
                        self._socket = sock
                        due = runtime.now() + self.settings.connect_timeout
                        self._deadline = runtime.call_at(due, self._on_connect_timeout)
                        runtime.watch(sock.fileno(), WRITE, self._on_connect_event)
                        return
                    self._last_error = code(failure)
                    sock.close()
                    continue
            self._failed(self._last_error)
            return

    def _drop_attempt(self) -> None:
        """With the lock held."""
        sock, self._socket = self._socket, None
        deadline, self._deadline = self._deadline, None
        if deadline is not None:
            deadline.cancel()
        if sock is not None:
            assert self._runtime is not None
            self._runtime.unwatch(sock.fileno())
            sock.close()

    def _on_connect_timeout(self) -> None:
        with self._lock:
            if self._state is not State.CONNECTING:
                return
            self._last_error = f"no answer within {self.settings.connect_timeout:g} s"
            self._drop_attempt()
        self._try_next()

    def _on_connect_event(self, events: int) -> None:
        runtime = self._runtime
        assert runtime is not None
        with self._lock:
            sock = self._socket
            if self._state is not State.CONNECTING or sock is None:
                return
            failure = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if failure == 0:
                try:
                    if sock.family != getattr(socket, "AF_UNIX", None) and sock.getpeername() == sock.getsockname():
                        failure = errno.ECONNREFUSED  # the system connected the socket to itself
                    else:
                        sock.getpeername()
                except OSError as error:
                    if error.errno != errno.ENOTCONN:
                        failure = error.errno or errno.EIO
                    else:
                        return  # an event meant for an earlier owner of the descriptor number
            if failure:
                self._last_error = code(failure)
                self._drop_attempt()
            else:
                self._socket = None
                deadline, self._deadline = self._deadline, None
                if deadline is not None:
                    deadline.cancel()
                runtime.unwatch(sock.fileno())
                connection = StreamConnection(
                    runtime,
                    self.port,
                    sock,
                    self.settings.framing,
                    self._buffer,
                    self._on_end,
                    batch=self.settings.common.batch,
                )
                self._connection = connection
                self._addresses = []
                self._tries = 0
                self.connects += 1
                self._enter(State.ONLINE)
        if failure:
            self._try_next()
            return
        if self._reported:
            self._reported = False
            runtime.report(self, f"{self.title}: connected to {self.target}")
        log.debug("%s: connected to %s", self.title, self.target)
        self._set_online(True)
        connection.watch()

    def _set_online(self, online: bool) -> None:
        runtime = self._runtime
        assert runtime is not None
        with self._lock:
            if self._state is State.CLOSED:
                return
            with runtime.lock:
                self.port.online = online
        runtime.changed(self.port)

    # -- ends and waits -------------------------------------------------------------------------------------------

    def _on_end(self, connection: StreamConnection, end: End) -> None:
        with self._lock:
            if self._state is State.CLOSED or connection is not self._connection:
                return
            self._connection = None
            lasted = self._now() - connection.since
            if lasted >= STALLED_WAIT_LIMIT:
                self._stalls = 0
            if end.cause is Cause.STALLED:
                self._stalls += 1
        self._set_online(False)
        self._failed(str(end))

    def _failed(self, reason: str) -> None:
        """No connection now. The next try is a deadline, unless there were enough."""
        runtime, settings = self._runtime, self.settings
        assert runtime is not None
        with self._lock:
            if self._state is State.CLOSED:
                return
            self._last_error = reason
            now, limit = runtime.now(), settings.max_reconnect_tries
            say = not self._reported and now >= self._quiet_until
            if limit is not None and self._tries >= limit:
                self._enter(State.GIVEN_UP)
                what = f"given up after {self._tries} tries"
                say = True
            else:
                self._tries += 1
                self._enter(State.WAITING)
                wait = min(settings.reconnect_wait * 2.0 ** max(self._stalls - 1, 0), STALLED_WAIT_LIMIT)
                self._deadline = runtime.call_at(now + wait + self._jitter(), self._attempt)
                what = f"next try in {wait:.0f} s"
            if say:
                self._reported, self._quiet_until = True, now + REPORT_INTERVAL
        if say:
            runtime.report(self, f"{self.title}: {self.target} is not connected: {reason}; {what}")
        log.debug("%s: %s: %s; %s", self.title, self.target, reason, what)

    # -- any thread -----------------------------------------------------------------------------------------------

    def flush(self, port: Port) -> None:
        connection = self._connection
        if connection is not None:
            connection.flush()
        elif port.queue and self._runtime is not None:
            with self._runtime.lock:
                if self._connection is None:
                    port.drops[Drop.TX_OFFLINE] += len(port.take())

    def close(self) -> None:
        with self._lock:
            if self._state is State.CLOSED:
                return
            started = self._runtime is not None
            if started:
                self._drop_attempt()
                self._enter(State.CLOSED)
            self._state = State.CLOSED
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        if started:
            assert self._runtime is not None
            with self._runtime.lock:
                self.port.online = False
            self._runtime.detach(self.port)

    def status(self) -> dict[str, Any]:
        connection = self._connection
        found: dict[str, Any] = {
            "type": self.kind,
            "name": self.name,
            "target": self.target,
            "state": self._state.value,
            "state_for": self._now() - self._since if self._runtime is not None else 0.0,  # seconds
            "connects": self.connects,
            "last_error": self._last_error,
        }
        if connection is not None:
            found["connection"] = connection.status()
        return found
