"""Starts nodes as processes of their own and talks to them in JSON lines.

    with workspace() as space:
        port = free_port()
        a = StockPeer(space.config("a", [tcp_server(port)]))
        b = StockPeer(space.config("b", [tcp_client(port)]))
        with started(a, b):
            here = a.request("destination", name="demo.one", announce=True)["dest"]
            b.expect("announce", dest=here)
            link = b.request("open", dest=here, name="demo.one")["link"]

Nothing in here sleeps: every wait is for a line from a process, with a deadline. A process is ended by asking, then by
its own handle. The peer program and its commands are described in `interop/stock_peer.py`; any other program that
speaks the same lines can be driven by `Peer`.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

HERE = Path(__file__).resolve().parent
RNS_VERSION = "1.5.7"  # what the scenarios were written against
STOCK_PYTHON = "RNSFAST_STOCK_PYTHON"  # names an interpreter that has `rns`, if this one has not

Event = dict[str, Any]


class InteropError(AssertionError):
    """Something a scenario needed did not happen; the message carries what the process said last."""


class StockMissing(InteropError):
    """There is no interpreter with the stock package."""


# ------------------------------------------------------------------------------------------------- the stock package
@functools.cache
def stock_python() -> str:
    """The interpreter that has `rns`. Raises StockMissing with one sentence if there is none: suites fail, not skip."""
    python = os.environ.get(STOCK_PYTHON, sys.executable)
    code = "import importlib.metadata as m; print(m.version('rns'))"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    version = found.stdout.strip()
    if found.returncode != 0 or not version:
        raise StockMissing(
            f"the stock package is not installed for {python}: run `pip install rns=={RNS_VERSION}`, or name an "
            f"interpreter that has it in {STOCK_PYTHON}; interop tests cannot run without it and do not skip themselves"
        )
    if version != RNS_VERSION:
        raise StockMissing(f"{python} has rns {version}, the interop tests are written against rns {RNS_VERSION}")
    return python


# ------------------------------------------------------------------------------------------------------ configuration
_given: set[int] = set()
_given_lock = threading.Lock()


def free_port(kind: socket.SocketKind = socket.SOCK_STREAM) -> int:
    """A port on 127.0.0.1 that nobody listens on, never the same one twice in this process."""
    with _given_lock:
        while True:
            with socket.socket(socket.AF_INET, kind) as probe:
                probe.bind(("127.0.0.1", 0))
                port: int = probe.getsockname()[1]
            if port not in _given:
                _given.add(port)
                return port


@dataclass(frozen=True)
class Section:
    """One interface section of a config file. Values are written as they are given; booleans as yes and no."""

    name: str
    options: Mapping[str, object]

    def lines(self) -> list[str]:
        return [f"  [[{self.name}]]", *(f"    {key} = {_word(value)}" for key, value in self.options.items()), ""]


def _word(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def tcp_server(port: int, name: str = "TCP server", **options: object) -> Section:
    base = {"type": "TCPServerInterface", "enabled": True, "listen_ip": "127.0.0.1", "listen_port": port}
    return Section(name, {**base, **options})


def tcp_client(port: int, name: str = "TCP client", **options: object) -> Section:
    base = {"type": "TCPClientInterface", "enabled": True, "target_host": "127.0.0.1", "target_port": port}
    return Section(name, {**base, **options})


def backbone_server(port: int, name: str = "Backbone server", **options: object) -> Section:
    """Fast-flapping protection is off: a stock listener would refuse its seventh short visitor for twelve hours."""
    base = {
        "type": "BackboneInterface",
        "enabled": True,
        "listen_on": "127.0.0.1",
        "port": port,
        "block_fast_flapping": False,
    }
    return Section(name, {**base, **options})


def backbone_client(port: int, name: str = "Backbone client", **options: object) -> Section:
    base = {"type": "BackboneInterface", "enabled": True, "remote": "127.0.0.1", "target_port": port}
    return Section(name, {**base, **options})


def udp(listen: int, forward: int, name: str = "UDP", **options: object) -> Section:
    """One end of a pair on loopback. There is no link MTU discovery over it: links have 500."""
    base = {
        "type": "UDPInterface",
        "enabled": True,
        "listen_ip": "127.0.0.1",
        "listen_port": listen,
        "forward_ip": "127.0.0.1",
        "forward_port": forward,
    }
    return Section(name, {**base, **options})


SERVERS = {"tcp": tcp_server, "backbone": backbone_server}
CLIENTS = {"tcp": tcp_client, "backbone": backbone_client}


def access(network: str, passphrase: str, size_bits: int = 128) -> dict[str, object]:
    """Options for an access code, the same on both ends: `tcp_server(port, **access("net", "secret"))`."""
    return {"networkname": network, "passphrase": passphrase, "ifac_size": size_bits}


def write_config(
    directory: Path,
    interfaces: Sequence[Section],
    *,
    transport: bool = False,
    loglevel: int = 1,
    link_mtu_discovery: bool = True,
    implicit_proof: bool = True,
    share_instance: bool = False,
    **options: object,
) -> Path:
    """Write `directory/config`, usable by stock nodes and by ours. Further options go to the reticulum section."""
    directory.mkdir(parents=True, exist_ok=True)
    main: dict[str, object] = {
        "enable_transport": transport,
        "share_instance": share_instance,
        "panic_on_interface_error": False,
        "link_mtu_discovery": link_mtu_discovery,
        "use_implicit_proof": implicit_proof,
        **options,
    }
    lines = ["[reticulum]", *(f"  {key} = {_word(value)}" for key, value in main.items()), ""]
    lines += ["[logging]", f"  loglevel = {loglevel}", "", "[interfaces]"]
    for section in interfaces:
        lines += section.lines()
    (directory / "config").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return directory


@dataclass
class Workspace:
    """A temporary directory with one config directory for each node."""

    root: Path

    def config(self, name: str, interfaces: Sequence[Section], **options: Any) -> Path:
        """As `write_config`, in a directory of that name."""
        return write_config(self.root / name, interfaces, **options)

    def directory(self, name: str) -> Path:
        path = self.root / name
        path.mkdir(parents=True, exist_ok=True)
        return path


@contextmanager
def workspace() -> Iterator[Workspace]:
    root = Path(tempfile.mkdtemp(prefix="rnsfast-interop-"))
    try:
        yield Workspace(root)
    finally:
        shutil.rmtree(root, ignore_errors=True)


# -------------------------------------------------------------------------------------------------------------- peers
@dataclass
class Waits:
    """Deadlines in seconds. They bound failures; nothing waits that long when things work."""

    start: float = 30.0
    answer: float = 20.0
    event: float = 20.0
    leave: float = 6.0


@dataclass
class Peer:
    """A process that takes commands as JSON lines and answers with replies and events as JSON lines.

    A command is `{"id": n, "do": name, …}`. Its reply is `{"re": n, "ok": true, …}` or, when it failed,
    `{"re": n, "ok": false, "error": …}`. An event is `{"event": name, …}`. A line that is no JSON object becomes the
    event "line" with its `text`, an object that is neither reply nor event becomes the event "json". Events are kept in
    the order they came until `expect` takes them. Every method may be called from any thread.
    """

    command: Sequence[str]
    config: Path
    label: str = ""
    ready: str | None = "ready"  # the event that says the program is up; None: do not wait
    waits: Waits = field(default_factory=Waits)
    environment: Mapping[str, str] = field(default_factory=dict)
    takes_commands: bool = True  # False: asked to leave by a signal instead of "quit"

    def __post_init__(self) -> None:
        self.label = self.label or self.config.name
        self.hello: Event = {}
        self._changed = threading.Condition()
        self._writing = threading.Lock()
        self._events: list[Event] = []
        self._replies: dict[int, Event] = {}
        self._next = 0
        self._ended = False
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._log = self.config / "stderr.log"

    # -- life
    def start(self) -> Self:
        """Start the process and wait for its ready event. One that has ended can be started again."""
        with self._changed:
            self._ended = False
            self._events.clear()
            self._replies.clear()
        self.config.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as errors:
            self._process = subprocess.Popen(
                list(self.command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                encoding="utf-8",
                errors="replace",
                env={**os.environ, "PYTHONUNBUFFERED": "1", **self.environment},
            )
        self._reader = threading.Thread(target=self._read, name=f"{self.label} lines", daemon=True)
        self._reader.start()
        if self.ready is not None:
            try:
                self.hello = self.expect(self.ready, timeout=self.waits.start)
            except BaseException:
                self.kill()
                raise
        return self

    def __enter__(self) -> Self:
        return self if self._process is not None else self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        return self._running().pid

    def stop(self) -> int | None:
        """Ask the process to leave, kill it after a deadline. Returns its exit status; harmless when it is gone."""
        process = self._process
        if process is None:
            return None
        if self.takes_commands:
            with suppress(OSError, ValueError):
                self.write(json.dumps({"id": 0, "do": "quit"}) + "\n")
        else:
            process.terminate()
        with suppress(OSError, ValueError):
            if process.stdin is not None:
                process.stdin.close()
        return self._reap(self.waits.leave)

    def interrupt(self) -> None:
        """What Ctrl-C does."""
        self._running().send_signal(signal.SIGINT)

    def kill(self) -> int | None:
        """End the process at once, as a power cut would."""
        if self._process is not None:
            self._process.kill()
        return self._reap(self.waits.leave)

    def _reap(self, patience: float) -> int:
        process = self._running()
        try:
            status = process.wait(patience)
        except subprocess.TimeoutExpired:
            process.kill()
            status = process.wait(10)
        if self._reader is not None and self._reader is not threading.current_thread():
            self._reader.join(10)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        return status

    def wait_exit(self, timeout: float) -> int:
        """Wait for a process that leaves by itself. Raises InteropError if it does not."""
        try:
            return self._running().wait(timeout)
        except subprocess.TimeoutExpired:
            raise InteropError(f"{self.label} is still running after {timeout} s\n{self.said()}") from None

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            raise InteropError(f"{self.label} was not started")
        return self._process

    # -- lines
    def write(self, text: str) -> None:
        """Put text into the standard input of the process."""
        pipe = self._running().stdin
        if pipe is None:
            raise InteropError(f"{self.label} has no standard input")
        with self._writing:
            pipe.write(text)
            pipe.flush()

    def _read(self) -> None:
        pipe = self._running().stdout
        if pipe is not None:
            for text in pipe:
                self._take(text)
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _take(self, text: str) -> None:
        try:
            message = json.loads(text)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            message = {"event": "line", "text": text.rstrip("\n")}
        with self._changed:
            if "re" in message:
                self._replies[message["re"]] = message
            else:
                message.setdefault("event", "json")
                self._events.append(message)
            self._changed.notify_all()

    # -- requests and events
    def begin(self, do: str, **arguments: Any) -> int:
        """Send a command and return its number at once, for `finish`."""
        with self._changed:
            self._next += 1
            number = self._next
        try:
            self.write(json.dumps({"id": number, "do": do, **arguments}) + "\n")
        except (OSError, ValueError) as error:
            raise InteropError(f"{self.label} takes no commands any more ({error})\n{self.said()}") from error
        return number

    def finish(self, number: int, timeout: float | None = None, *, check: bool = True) -> Event:
        """The reply to command `number`. With `check`, a reply that reports an error raises InteropError."""
        limit = self.waits.answer if timeout is None else timeout
        with self._changed:
            self._changed.wait_for(lambda: number in self._replies or self._ended, limit)
            reply = self._replies.pop(number, None)
        if reply is None:
            why = "ended before it answered" if self._ended else f"did not answer within {limit} s"
            raise InteropError(f"{self.label} {why} (command {number})\n{self.said()}")
        if check and not reply.get("ok"):
            raise InteropError(f"{self.label}: {reply.get('error', reply)}")
        return reply

    def request(self, do: str, *, timeout: float | None = None, check: bool = True, **arguments: Any) -> Event:
        """Send a command and wait for its reply. `timeout` goes along as the peer's own limit."""
        limit = self.waits.answer if timeout is None else timeout
        return self.finish(self.begin(do, timeout=limit, **arguments), limit + 2, check=check)

    def request_proof(self, do: str, *, tries: int = 5, **arguments: Any) -> Event:
        """A command that sends a packet and waits for its proof, repeated until there is one.

        A stock node makes the receipt of a link packet after sending it, so a fast proof can miss it (protocol 03, T2).
        """
        for _ in range(tries - 1):
            reply = self.request(do, wait=True, **arguments)
            if reply["status"] == "delivered":
                return reply
        return self.request(do, wait=True, **arguments)

    def expect(self, event: str, *, timeout: float | None = None, **values: Any) -> Event:
        """Wait for the oldest event of that name whose fields have these values, and take it out of the queue."""
        limit = self.waits.event if timeout is None else timeout
        found: list[Event] = []

        def there() -> bool:
            for at, one in enumerate(self._events):
                if one.get("event") == event and all(one.get(key) == value for key, value in values.items()):
                    found.append(self._events.pop(at))
                    return True
            return self._ended

        with self._changed:
            self._changed.wait_for(there, limit)
        if found:
            return found[0]
        why = "ended" if self._ended else f"{limit} s passed"
        raise InteropError(f"{self.label}: {why} without event {event} {values or ''}\n{self.said()}")

    def collect(self, event: str, count: int, *, timeout: float | None = None, **values: Any) -> list[Event]:
        """The next `count` such events, in order, within `timeout` altogether."""
        end = time.monotonic() + (self.waits.event if timeout is None else timeout)
        return [self.expect(event, timeout=max(0.0, end - time.monotonic()), **values) for _ in range(count)]

    def seen(self, event: str, **values: Any) -> list[Event]:
        """Events of that kind that are waiting now; leaves them where they are."""
        with self._changed:
            waiting = list(self._events)
        return [e for e in waiting if e.get("event") == event and all(e.get(k) == v for k, v in values.items())]

    def said(self) -> str:
        """What would help to find out what went wrong: events not yet taken and the end of standard error."""
        with self._changed:
            waiting = [json.dumps(event)[:300] for event in self._events[-12:]]
        with suppress(OSError):
            waiting += self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-20:]
        return "\n".join(f"  {self.label}| {line}" for line in waiting)


class StockPeer(Peer):
    """A stock node, driven through `interop/stock_peer.py`. `config` is a directory with a config file in it."""

    def __init__(self, config: Path, label: str = "", *, waits: Waits | None = None, hurry: bool = False) -> None:
        command = [stock_python(), str(HERE / "stock_peer.py"), "--config", str(config)]
        command += ["--hurry"] if hurry else []
        super().__init__(command, config, label, waits=waits or Waits())


@contextmanager
def started(*peers: Peer) -> Iterator[None]:
    """Start several peers one after the other and stop all of them, last first, whatever happens."""
    running: list[Peer] = []
    try:
        for peer in peers:
            running.append(peer)
            peer.start()
        yield
    finally:
        for peer in reversed(running):
            peer.stop()


def wait_connected(server: Peer, client: Peer, timeout: float = 20.0) -> None:
    """Return when packets pass between two neighbours in both directions.

    A listener is ready before anybody has connected to it, and what it announces until then reaches nobody. The client
    asks for a path to a destination of the server: the question and the answer both have to get through.
    """
    probe = server.request("destination", name=f"interop.probe.{os.urandom(8).hex()}")["dest"]
    if not client.request("wait_path", dest=probe, timeout=timeout)["found"]:
        raise InteropError(f"{client.label} does not reach {server.label}\n{client.said()}\n{server.said()}")
