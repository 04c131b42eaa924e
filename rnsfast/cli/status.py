"""`rnsfast status`: what a running node is doing."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any, Final

import click

from rnsfast.cli.common import config_directory, state_of
from rnsfast.cli.exits import CommandError, Exit, printable
from rnsfast.cli.progress import time_text
from rnsfast.node.control import control_path, is_available, short_address

PATIENCE: Final = 10.0  # seconds for the whole answer
MAX_ANSWER: Final = 256 << 20  # bytes; 10,000 connections are 5 MB
WIDTH: Final = 20  # columns of names, at least
SAID: Final = frozenset(
    ("name", "type", "state", "state_for", "last_error", "connection", "connections")
)  # of an interface: they have their place

Row = tuple[int, str, str]  # indentation, name, value


@click.command()
@click.option("--config", metavar="DIR", help="Configuration directory of the node; nothing is made or changed there.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as one JSON document, for programs.")
def status(config: str | None, as_json: bool) -> None:
    """Show what the running node of a configuration directory is doing; status 7 if none runs."""
    document = ask(config_directory(config))
    if as_json:
        click.echo(json.dumps(document, indent=2))
        return
    click.echo("\n".join(render(document)))


# ------------------------------------------------------------------ asking


def ask(directory: Path) -> dict[str, Any]:
    """What the node of that directory says, or CommandError."""
    if not is_available():
        raise CommandError("status is not available on this system: it has no sockets in the file system", Exit.NODE)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            _connect(sock, control_path(directory))
            answer = _read(sock)
    except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError) as error:
        raise CommandError(f"no node is running with the configuration directory {directory}", Exit.NODE) from error
    except (TimeoutError, BlockingIOError) as error:
        raise CommandError(f"the node of {directory} did not answer within {PATIENCE:.0f} s", Exit.NODE) from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise CommandError(f"the node of {directory} cannot be asked: {reason}", Exit.NODE) from error
    if not answer:
        why = "it is stopping, or its log says what went wrong"
        raise CommandError(f"the node of {directory} ended the connection without an answer: {why}", Exit.NODE)
    try:
        document = json.loads(answer)
    except (ValueError, RecursionError) as error:
        raise CommandError(f"what the node of {directory} answered is damaged or incomplete", Exit.NODE) from error
    if not isinstance(document, dict):
        raise CommandError(f"what the node of {directory} answered is no status", Exit.NODE)
    return document


def _connect(sock: socket.socket, path: Path) -> None:
    """Connect, waiting if many others do: the system's own time limit does that, Python's gives up at once."""
    with suppress(OSError):
        limit = struct.pack("@ll", int(PATIENCE), int(PATIENCE % 1 * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    with short_address(path) as address:
        sock.connect(address)


def _read(sock: socket.socket) -> bytes:
    """All that comes until the other side ends."""
    end = monotonic() + PATIENCE
    answer = bytearray()
    while len(answer) <= MAX_ANSWER:
        sock.settimeout(max(end - monotonic(), 0.001))
        chunk = sock.recv(1 << 16)
        if not chunk:
            return bytes(answer)
        answer += chunk
    raise OSError(f"its answer is longer than {MAX_ANSWER} bytes")


# ------------------------------------------------------------------ showing


def render(document: Mapping[str, Any]) -> list[str]:
    """The lines to print. Whatever a newer or an older node says is shown, or left out if it is missing."""
    version, pid, uptime = (document.get(key) for key in ("version", "pid", "uptime"))
    blocks = [list(_general(document))]
    ports = [port for port in _list(document.get("ports")) if isinstance(port, Mapping)]
    interfaces = [found for found in _list(document.get("interfaces")) if isinstance(found, Mapping)]
    for interface in interfaces:
        own = [port for port in ports if port.get("interface") == interface.get("name")]
        blocks.append(list(_interface(interface, own)))
    names = [interface.get("name") for interface in interfaces]
    if others := [port for port in ports if port.get("interface") not in names]:
        blocks.append([(0, "other ports", ""), *(row for port in others for row in _port(port, {}))])
    if failed := [found for found in _list(document.get("failed")) if isinstance(found, Mapping)]:
        blocks.append([_header(found, f"failed: {found.get('reason')}") for found in failed])
    if not interfaces and not failed:
        blocks.append([(0, "interfaces", "none is enabled")])
    width = max(WIDTH, *(2 * indent + len(name) for rows in blocks for indent, name, value in rows if value))
    lines = [printable(f"rnsfast {version}, process {pid}, running for {_seconds(uptime)}")]
    for rows in blocks:
        lines += [_line(row, width) for row in rows]
        lines.append("")
    return lines[:-1]


def _line(row: Row, width: int) -> str:
    indent, name, value = row
    return printable(f"{'  ' * indent}{name:<{width - 2 * indent}}  {value}".rstrip())


def _header(interface: Mapping[str, Any], state: str) -> Row:
    """As `rnsfast node` says it."""
    return 0, f"{interface.get('name')} ({interface.get('type')}): {state}", ""


def _general(document: Mapping[str, Any]) -> Iterator[Row]:
    special = ("version", "pid", "uptime", "interfaces", "failed", "ports", "drops", "configdir")
    yield 0, "configuration", str(document.get("configdir", ""))
    yield from _rows(0, {key: value for key, value in document.items() if key not in special})
    yield from _drops(0, document.get("drops"))


def _interface(interface: Mapping[str, Any], ports: list[Mapping[str, Any]]) -> Iterator[Row]:
    state = state_of(dict(interface))
    since = interface.get("state_for")
    lasting = f" for {_seconds(since)}" if since and state == str(interface.get("state")) else ""
    yield _header(interface, f"{state}{lasting}")
    yield from _rows(1, {key: value for key, value in interface.items() if key not in SAID})
    connections = interface.get("connections")
    details = dict(connections) if isinstance(connections, Mapping) else {}
    only = interface.get("connection")
    if isinstance(only, Mapping):
        details[str(ports[0].get("name")) if len(ports) == 1 else "connection"] = only
    for port in ports:
        yield from _port(port, details.pop(str(port.get("name")), {}))
    for name, found in details.items():  # just coming or going
        yield 1, str(name), ""
        yield from _rows(2, found if isinstance(found, Mapping) else {"is": found})


def _port(port: Mapping[str, Any], details: Any) -> Iterator[Row]:
    yield 1, str(port.get("name")), ""
    yield 2, "state", "online" if port.get("online") else "offline"
    rest = dict(details) if isinstance(details, Mapping) else {}
    yield from _rows(2, {key: rest.pop(key) for key in ("backend", "connected_for") if key in rest})
    for name, way in (("received", "rx"), ("sent", "tx")):
        yield 2, name, f"{_count(port.get(f'{way}_packets'), 'packet')}, {_count(port.get(f'{way}_bytes'), 'byte')}"
    special = ("name", "interface", "online", "drops", "rx_packets", "rx_bytes", "tx_packets", "tx_bytes")
    yield from _rows(2, {key: value for key, value in port.items() if key not in special})
    yield from _rows(2, rest)
    yield from _drops(2, port.get("drops"))


def _rows(indent: int, found: Mapping[str, Any]) -> Iterator[Row]:
    """Anything: scalars as they are, lists in a row, tables below."""
    for key, value in found.items():
        name = str(key).replace("_", " ")
        if isinstance(value, Mapping):
            if value:
                yield indent, name, ""
                yield from _rows(indent + 1, value)
        elif isinstance(value, list):
            yield indent, name, ", ".join(map(_scalar, value)) or "none"
        elif value is not None and value != "":
            yield indent, name, _seconds(value) if name.endswith(" for") else _scalar(value)


def _drops(indent: int, drops: Any) -> Iterator[Row]:
    """Named counters of what went no further, without the zeros."""
    counted = {key: n for key, n in drops.items() if n} if isinstance(drops, Mapping) else {}
    for number, (key, n) in enumerate(sorted(counted.items())):
        yield indent, "" if number else "dropped", f"{_scalar(n)} {key}"


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _scalar(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _seconds(value: Any) -> str:
    return time_text(value) if isinstance(value, int | float) and 0 <= value < 1e12 else str(value)


def _count(value: Any, what: str) -> str:
    return f"{_scalar(0 if value is None else value)} {what}{'' if value == 1 else 's'}"
