"""UDPInterface: a datagram is a packet.  Protocol 06, section 7.

There is no framing, no connection and no check: any sender is accepted, and nothing tells whether the other side is
there. A node that broadcasts hears itself; its own packets are sorted out here.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import socket
import struct
import sys
import threading
from dataclasses import dataclass
from typing import Any, Final

from rnsfast.engine.port import Port
from rnsfast.errors import InterfaceError
from rnsfast.interfaces.base import Address, Handle, Runtime, Section
from rnsfast.interfaces.common import BUILT_IN, UDP, CommonConfig, Defaults, bracketed, ifac_key, make_port
from rnsfast.interfaces.echoes import Echoes, may_come_back
from rnsfast.interfaces.packets import PacketConnection
from rnsfast.interfaces.sockets import bind_failure, code, device_broadcast
from rnsfast.osio.backend import bounds, datagram_socket, open_backend
from rnsfast.osio.contract import Kind, Peer
from rnsfast.osio.peers import make_peer

log = logging.getLogger(__name__)

RECEIVE_BUFFER: Final = 4 << 20  # bytes asked of the system; the usual 208 KiB hold 200 small packets
SEND_BUFFER: Final = 1 << 20  # bytes
REOPEN_WAIT: Final = 5.0  # seconds until a socket that broke, or a name that did not resolve, is tried again

_SO_RCVBUFFORCE: Final = 33
_SO_SNDBUFFORCE: Final = 32
_SO_MEMINFO: Final = 55
_DROPS: Final = 8  # place of the dropped packets in it


@dataclass(frozen=True, slots=True, kw_only=True)
class UdpConfig:
    """One `[[name]]` section with `type = UDPInterface`.  Protocol 06, section 7."""

    common: CommonConfig
    listen_ip: str | None  # None only with a device: its broadcast address
    listen_port: int  # 0 lets the system choose; not in files
    forward_ip: str | None = None  # None with a device: its broadcast address; otherwise nothing is sent
    forward_port: int | None = None
    device: str | None = None
    batch: int | None = None  # packets a system call; None: as the system's back end prefers
    segmentation: bool = True  # whether the system may cut and join runs of packets

    @classmethod
    def from_section(cls, section: Section, defaults: Defaults = BUILT_IN) -> UdpConfig:
        """Raises ConfigError."""
        common = CommonConfig.from_section(section, defaults)
        device = section.text("device", None)
        port = section.integer("port", 1, 65535, default=None)
        listen_port = section.integer("listen_port", 1, 65535, default=port)
        forward_port = section.integer("forward_port", 1, 65535, default=port)
        listen_ip = section.text("listen_ip", None) if device else section.text("listen_ip")
        forward_ip = section.text("forward_ip", None)
        if listen_port is None:
            listen_port = section.integer("listen_port", 1, 65535)  # says that it is missing
        if forward_ip is not None and forward_port is None:
            raise section.fail("forward_port", "is missing: forward_ip needs a port to send to")
        try:
            _, low, high = bounds(Kind.DATAGRAM)
        except OSError as error:  # RNSFAST_OSIO asks for what is not there
            raise section.fail("type", f"UDPInterface cannot be opened: {error.strerror}") from error
        found = cls(
            common=common,
            listen_ip=listen_ip,
            listen_port=listen_port,
            forward_ip=forward_ip,
            forward_port=forward_port,
            device=device,
            batch=section.integer("batch", low, high, default=None),
            segmentation=section.boolean("segmentation", True),
        )
        if listen_ip and forward_ip and _family(listen_ip) and _family(forward_ip):
            if _family(listen_ip) != _family(forward_ip):
                raise section.fail(
                    "forward_ip", f"{forward_ip} cannot be reached from {listen_ip}: one is IPv4, the other IPv6"
                )
        return found


class UdpInterface:
    """Talks to UDPInterfaces, one to one or by broadcast. One port for ever, one socket at a time."""

    kind = "UDPInterface"

    def __init__(self, config: UdpConfig) -> None:
        self.config = config
        self.name = config.common.name
        self.title = f"{self.kind}[{self.name}]"
        self._listen_ip = config.listen_ip or ""
        self._forward_ip = config.forward_ip
        self.port: Port = self._make_port()
        self._runtime: Runtime | None = None
        self._lock = threading.Lock()  # socket and state
        self._connection: PacketConnection | None = None
        self._sock: socket.socket | None = None
        self._retry: Handle | None = None
        self._since = 0.0
        self._attached = False
        self._closed = False
        self._last_error = ""

    def _make_port(self) -> Port:
        common = self.config.common
        display = f"{self.kind}[{self.name}/{bracketed(self._listen_ip, self.config.listen_port)}]"
        return make_port(display, common, UDP, ifac_key(common, UDP))

    @property
    def ports(self) -> list[Port]:
        return [self.port] if self._attached else []

    @property
    def address(self) -> Any:
        """Where it listens, as the system says; None while it does not."""
        sock = self._sock
        return None if sock is None else sock.getsockname()

    # -- opening --------------------------------------------------------------------------------------------------

    def start(self, runtime: Runtime) -> None:
        """Bind. Raises InterfaceError, and may then be called again."""
        config = self.config
        if config.device is not None and (config.listen_ip is None or config.forward_ip is None):
            broadcast = self._broadcast_of(config.device)
            self._listen_ip = config.listen_ip or broadcast
            self._forward_ip = config.forward_ip or (broadcast if config.forward_port else None)
            if not self._attached:
                self.port = self._make_port()
        sock = self._bind()
        try:
            peer = self._known_peer(sock.family)
        except InterfaceError:
            sock.close()
            raise
        with self._lock:
            if self._closed:
                sock.close()
                return
            self._runtime, self._sock = runtime, sock
            first, self._attached = not self._attached, True
        if self._forward_ip is None:
            self.port.outgoing = False  # nowhere to send to
        if first:
            runtime.attach(self.port, self)
        if peer is None and self._forward_ip is not None:
            self._resolve()
        else:
            self._go_online(sock, peer)

    def _broadcast_of(self, device: str) -> str:
        try:
            return device_broadcast(device)
        except OSError as error:
            if error.errno == errno.ENODEV:
                raise InterfaceError(f"{self.title}: there is no network device {device}", retryable=True) from error
            raise InterfaceError(
                f"{self.title}: device {device}: {error.strerror}", retryable=error.errno != errno.ENOSYS
            ) from error

    def _bind(self) -> socket.socket:
        """A bound socket that may broadcast. Raises InterfaceError."""
        config = self.config
        shown = bracketed(self._listen_ip, config.listen_port)
        try:
            found = socket.getaddrinfo(
                self._listen_ip, config.listen_port, type=socket.SOCK_DGRAM, flags=socket.AI_PASSIVE
            )
            wanted = _family(self._forward_ip)
            found.sort(key=lambda entry: entry[0] != (wanted or socket.AF_INET))
            family, _, _, _, address = found[0]
            sock = datagram_socket(family)
        except (OSError, UnicodeError) as error:
            cause = error if isinstance(error, OSError) else OSError(errno.EINVAL, str(error))
            raise bind_failure(self.title, shown, cause) from error
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
            _enlarge(sock)
            sock.bind(address)
        except OSError as error:
            sock.close()
            raise bind_failure(self.title, shown, error) from error
        return sock

    def _known_peer(self, family: int) -> Peer | None:
        """Where to send to, if that is a numeric address. Raises InterfaceError for one of another family."""
        host, port = self._forward_ip, self.config.forward_port
        if host is None or port is None or not _family(host):
            return None
        plain, _, zone = host.partition("%")
        if _family(host) != family:
            raise InterfaceError(
                f"{self.title}: {host} cannot be reached from {self._listen_ip}: one is IPv4, the other IPv6",
                retryable=False,
            )
        scope = _scope(zone)
        if scope is None:
            raise InterfaceError(f"{self.title}: {host}: there is no network device {zone}", retryable=True)
        return make_peer(plain, port, scope=scope)

    def _resolve(self) -> None:
        """Look the name up that packets go to."""
        runtime = self._runtime
        with self._lock:
            self._retry = None
            if self._closed or runtime is None:
                return
        assert self._forward_ip is not None and self.config.forward_port is not None
        runtime.resolve(self._forward_ip, self.config.forward_port, self._resolved)

    def _resolved(self, answer: list[Address] | OSError) -> None:
        sock = self._sock
        if sock is None:
            return
        if not isinstance(answer, OSError):
            for family, address in answer:
                if family == sock.family:
                    scope = address[3] if len(address) == 4 else 0
                    self._go_online(sock, make_peer(str(address[0]).partition("%")[0], address[1], scope=scope))
                    return
            answer = OSError(errno.EAFNOSUPPORT, "has no address of the family that this interface listens on")
        reason = f"{self._forward_ip} {answer.strerror if answer.errno == errno.EAFNOSUPPORT else code(answer)}"
        self._wait(reason, self._resolve)

    def _go_online(self, sock: socket.socket, peer: Peer | None) -> None:
        runtime, port, config = self._runtime, self.port, self.config
        assert runtime is not None
        with self._lock:
            if self._closed or self._sock is not sock:
                return
            io = open_backend(
                Kind.DATAGRAM,
                sock,
                max_batch=config.batch,
                max_packet=port.hw_mtu + port.ifac_size,
                peers=False,
                segmentation=config.segmentation,
                coalescing=config.segmentation,
            )
            echoes = None if peer is None or not may_come_back(peer) else Echoes(runtime.now, port, runtime.lock)
            connection = self._connection = PacketConnection(
                runtime,
                port,
                io,
                peer,
                self._on_broken,
                wrap=None if echoes is None else echoes.remember,
                unwrap=None if echoes is None else echoes.sift,
            )
            self._since, self._last_error = runtime.now(), ""
        with runtime.lock:
            port.online = not self._closed  # `close` says no under this lock, and says that it closes before
        runtime.changed(port)
        connection.watch()

    # -- trouble --------------------------------------------------------------------------------------------------

    def _on_broken(self, error: int) -> None:
        """The socket is unusable: open another one."""
        runtime = self._runtime
        assert runtime is not None
        with self._lock:
            self._connection = self._sock = None
        with runtime.lock:
            self.port.online = False
        runtime.changed(self.port)
        self._wait(code(error), self._reopen)

    def _reopen(self) -> None:
        runtime = self._runtime
        with self._lock:
            self._retry = None
            if self._closed or runtime is None:
                return
        try:
            self.start(runtime)
        except InterfaceError as error:
            self._wait(str(error), self._reopen)

    def _wait(self, reason: str, then: Any) -> None:
        runtime = self._runtime
        assert runtime is not None
        with self._lock:
            if self._closed:
                return
            first, self._last_error = not self._last_error, reason
            self._retry = runtime.call_at(runtime.now() + REOPEN_WAIT, then)
        if first:
            runtime.report(self, f"{self.title}: {reason}; trying again every {REOPEN_WAIT:.0f} s")

    # -- any thread -----------------------------------------------------------------------------------------------

    def flush(self, port: Port) -> None:
        connection = self._connection
        if connection is not None:
            connection.flush()

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            connection, self._connection = self._connection, None
            sock, self._sock = self._sock, None
            retry, self._retry = self._retry, None
            attached, self._attached = self._attached, False
        if retry is not None:
            retry.cancel()
        if connection is not None:
            connection.close()
        elif sock is not None:
            sock.close()
        if attached and self._runtime is not None:
            with self._runtime.lock:
                self.port.online = False
            self._runtime.detach(self.port)

    def status(self) -> dict[str, Any]:
        connection, sock, runtime = self._connection, self._sock, self._runtime
        if connection is not None:
            state = "up"
        elif self._closed or runtime is None:
            state = "closed"
        else:
            state = "waiting for the next try"
        found: dict[str, Any] = {
            "type": self.kind,
            "name": self.name,
            "listen": bracketed(self._listen_ip, self.config.listen_port),
            "forward": bracketed(self._forward_ip, self.config.forward_port or 0) if self._forward_ip else None,
            "state": state,
            "state_for": runtime.now() - self._since if runtime is not None and connection is not None else 0.0,
            "last_error": self._last_error,
        }
        if connection is not None:
            found["connection"] = connection.status()
            if sock is not None:
                found["dropped_by_system"] = _dropped(sock)
        return found


def _family(host: str | None) -> int:
    """The address family of a numeric address; 0 for a name."""
    if not host:
        return 0
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return 0
    return int(socket.AF_INET if address.version == 4 else socket.AF_INET6)


def _scope(zone: str) -> int | None:
    """The number of a network device; None if there is no such."""
    if not zone:
        return 0
    if zone.isdigit():
        return int(zone)
    try:
        return socket.if_nametoindex(zone)
    except OSError:
        return None


def _enlarge(sock: socket.socket) -> None:
    """Larger buffers, beyond the system's limit where that is allowed: a burst that does not fit is lost silently."""
    for forced, usual, size in (
        (_SO_RCVBUFFORCE, socket.SO_RCVBUF, RECEIVE_BUFFER),
        (_SO_SNDBUFFORCE, socket.SO_SNDBUF, SEND_BUFFER),
    ):
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, usual, size)
        if sys.platform == "linux":
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, forced, size)


def _dropped(sock: socket.socket) -> int | None:
    """Packets that found the receive buffer full; None where the system does not say."""
    if sys.platform != "linux":
        return None
    try:
        found = sock.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, 36)
    except OSError:
        return None
    return int(struct.unpack("=9I", found)[_DROPS]) if len(found) == 36 else None
