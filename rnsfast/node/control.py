"""The socket at which a running node says what it is doing: one JSON document a connection, nothing is read.

It stands in the node's `storage` directory and is served by the reactor, so it costs nothing while nobody asks. Only
the owner of the files can connect. Somebody who does not read, floods or sends garbage gets a bounded share: so many
connections at a time, so many seconds each, and a document is used again while making a new one would take more than
a twentieth of the reactor's time.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import socket
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from enum import Enum
from math import isfinite
from pathlib import Path
from typing import Any, Final, Protocol

from rnsfast.interfaces.base import Handle
from rnsfast.node.files import set_aside
from rnsfast.osio.poller import READ, WRITE

log = logging.getLogger(__name__)

NAME: Final = "storage/control.sock"  # below the configuration directory
MAX_CLIENTS: Final = 16  # connections that are being answered; further ones wait in the system's queue
BACKLOG: Final = 16  # connections in that queue
PATIENCE: Final = 5.0  # seconds in which a client must have read everything
REUSE: Final = 20  # times as long as a document took to make it is used again, so making takes a twentieth at most
MAX_REUSE: Final = 1.0  # seconds
ACCEPT_AGAIN: Final = 1.0  # seconds until the next try after accepting failed (no descriptor left)
LONGEST_NAME: Final = 100  # bytes of a socket's address that every system takes: 107 on Linux, 103 on macOS
MAX_DEPTH: Final = 16  # levels of a document


class Polling(Protocol):
    """What the socket needs of the reactor."""

    def now(self) -> float: ...
    def watch(self, fd: int, events: int, callback: Callable[[int], None]) -> None: ...
    def rewatch(self, fd: int, events: int) -> None: ...
    def unwatch(self, fd: int) -> None: ...
    def call_at(self, when: float, fn: Callable[[], None]) -> Handle: ...


def control_path(configdir: str | os.PathLike[str]) -> Path:
    """Where the node of a configuration directory listens."""
    return Path(configdir) / NAME


def is_available() -> bool:
    """Whether this system has such sockets."""
    return hasattr(socket, "AF_UNIX")


@contextmanager
def short_address(path: Path) -> Iterator[str]:
    """An address for bind() and connect() that names `path` and fits, whatever its length. Raises OSError."""
    if len(os.fsencode(path)) <= LONGEST_NAME:
        yield str(path)
    elif os.path.isdir("/proc/self/fd"):
        flags = os.O_DIRECTORY | os.O_CLOEXEC | getattr(os, "O_PATH", os.O_RDONLY)
        directory = os.open(path.parent, flags)
        try:
            yield f"/proc/self/fd/{directory}/{path.name}"
        finally:
            os.close(directory)
    else:
        private = tempfile.mkdtemp(prefix="rnsfast-")
        try:
            link = os.path.join(private, "d")
            os.symlink(os.path.abspath(path.parent), link)
            yield os.path.join(link, path.name)
        finally:
            shutil.rmtree(private, ignore_errors=True)


class _Client:
    """Somebody who is being told."""

    __slots__ = ("deadline", "rest", "sock")

    def __init__(self, sock: socket.socket, document: bytes) -> None:
        self.sock = sock
        self.rest = memoryview(document)
        self.deadline: Handle | None = None


class ControlSocket:
    """The listening socket of one node and the connections to it.

    Args:
        configdir: the node's directory; the node has its lock, so a socket that is there is a dead one's.
        polling: the reactor.
        snapshot: what to say; called on the reactor thread.

    `open` and `close` may be called from any thread, without the node's lock.
    """

    def __init__(
        self, configdir: str | os.PathLike[str], polling: Polling, snapshot: Callable[[], Mapping[str, Any]]
    ) -> None:
        self.path = control_path(os.path.abspath(configdir))
        self._polling = polling
        self._snapshot = snapshot
        self._lock = threading.Lock()  # comes before the locks of interfaces and node
        self._listener: socket.socket | None = None
        self._inode: tuple[int, int] | None = None  # of the socket that is ours
        self._clients: set[_Client] = set()
        self._document = b""
        self._fresh_until = float("-inf")

    def open(self) -> None:
        """Begin to listen. Never raises: a node without this socket is a good node, one warning is logged."""
        if not is_available():
            log.info("%s: not made, this system has no such sockets; `rnsfast status` cannot ask this node", self.path)
            return
        try:
            listener = self._bind()
        except OSError as error:
            log.warning("%s: cannot be made (%s); `rnsfast status` cannot ask this node", self.path, _reason(error))
            return
        with self._lock:
            self._listener = listener
            self._polling.watch(listener.fileno(), READ, self._on_connection)

    def _bind(self) -> socket.socket:
        """Nobody can connect before the socket listens, and by then only its owner may."""
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISSOCK(os.lstat(self.path).st_mode):
                os.unlink(self.path)
            else:
                set_aside(self.path, "it is not a socket", "nothing")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.setblocking(False)
            with contextlib.suppress(OSError):  # where it has an effect, the mode is right from the first moment
                os.fchmod(listener.fileno(), 0o600)
            with short_address(self.path) as address:
                listener.bind(address)
            made = os.lstat(self.path)
            self._inode = made.st_dev, made.st_ino
            if stat.S_IMODE(made.st_mode) != 0o600:
                os.chmod(self.path, 0o600)
            listener.listen(BACKLOG)
        except BaseException:
            listener.close()
            self._remove()
            raise
        return listener

    def _remove(self) -> None:
        """Remove the socket if it is the one we made."""
        with contextlib.suppress(OSError):
            found = os.lstat(self.path)
            if (found.st_dev, found.st_ino) == self._inode:
                os.unlink(self.path)
        self._inode = None

    def close(self) -> None:
        """Stop listening, end all connections, remove the socket. Idempotent."""
        with self._lock:
            listener, self._listener = self._listener, None
            if listener is None:
                return
            self._remove()
            self._polling.unwatch(listener.fileno())
            listener.close()
            for client in list(self._clients):
                self._end(client)
            self._document = b""

    # ------------------------------------------------------------------ on the reactor thread

    def _on_connection(self, events: int) -> None:
        """Take one connection; others of the same moment come with the reactor's next round, after packets."""
        with self._lock:
            listener = self._listener
            if listener is None:
                return
            try:
                sock, _ = listener.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError as error:
                log.debug("%s: a connection cannot be taken (%s)", self.path, _reason(error))
                self._polling.rewatch(listener.fileno(), 0)
                self._polling.call_at(self._polling.now() + ACCEPT_AGAIN, self._listen_again)
                return
            try:
                self._begin(sock)
            except BaseException:  # the reactor logs it
                sock.close()
                raise

    def _listen_again(self) -> None:
        with self._lock:
            self._arm()

    def _arm(self) -> None:
        if self._listener is not None:
            self._polling.rewatch(self._listener.fileno(), READ if len(self._clients) < MAX_CLIENTS else 0)

    def _begin(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        with contextlib.suppress(OSError):  # gone already
            sock.shutdown(socket.SHUT_RD)  # nothing is read: whoever writes is told
        client = _Client(sock, self._current())
        if self._send(client):
            sock.close()
            return
        self._polling.watch(sock.fileno(), WRITE, lambda events: self._on_writable(client))
        self._clients.add(client)
        client.deadline = self._polling.call_at(self._polling.now() + PATIENCE, lambda: self._on_deadline(client))
        self._arm()

    def _current(self) -> bytes:
        """The document: a new one, or the last one if it is young for what it cost."""
        begun = self._polling.now()
        if begun >= self._fresh_until:
            self._document = build_document(self._snapshot())
            now = self._polling.now()
            self._fresh_until = now + min(REUSE * (now - begun), MAX_REUSE)
        return self._document

    def _send(self, client: _Client) -> bool:
        """Send what goes. True if all is sent, or nobody is there any more."""
        try:
            while client.rest:
                client.rest = client.rest[client.sock.send(client.rest, getattr(socket, "MSG_NOSIGNAL", 0)) :]
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def _on_writable(self, client: _Client) -> None:
        with self._lock:
            if client in self._clients and self._send(client):
                self._end(client)

    def _on_deadline(self, client: _Client) -> None:
        with self._lock:
            if client in self._clients:
                self._end(client)

    def _end(self, client: _Client) -> None:
        self._clients.discard(client)
        self._polling.unwatch(client.sock.fileno())
        client.sock.close()
        if client.deadline is not None:
            client.deadline.cancel()
        self._arm()


def build_document(status: Mapping[str, Any]) -> bytes:
    """One line of JSON in ASCII."""
    return json.dumps(plain(status), allow_nan=False).encode("ascii") + b"\n"


def plain(value: Any, depth: int = MAX_DEPTH) -> Any:
    """`value` of what JSON has: bytes become hex, enumerations their word, numbers that are none null."""
    if isinstance(value, Enum):
        return value.value if isinstance(value.value, str) else value.name.lower()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, bytes | bytearray | memoryview):
        return value.hex()
    if depth and isinstance(value, Mapping):
        return {str(plain(key, 0)): plain(each, depth - 1) for key, each in value.items()}
    if depth and isinstance(value, list | tuple | AbstractSet):
        return [plain(each, depth - 1) for each in value]
    return str(value)


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
