#!/usr/bin/env python3
"""An IP tunnel over a link beside the cable it runs on: TCP throughput, round trips, small datagrams.

    tunnel.py [--quick] [--runs N] [--json FILE]

Two network namespaces joined by a veth pair, made and removed here, and a process of `rnsfast tun up` in each; the
carrier is TCP over the pair. Measured over the bare pair and through the tunnel, with the MTU that the link gives and
with 1400. Medians of the runs. Needs root and /dev/net/tun.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))

from interop.harness import free_port, write_config  # noqa: E402
from interop.harness import tcp_client as client  # noqa: E402
from interop.harness import tcp_server as server  # noqa: E402
from tests.namespaces import Namespace, join, namespace, obstacle  # noqa: E402

MB = 1_000_000
PATIENCE = 60.0
CABLE = ("192.168.77.1", "192.168.77.2")
INSIDE = ("10.77.0.1", "10.77.0.2")
WAYS = {"cable": None, "tunnel": (), "tunnel, mtu 1400": ("--mtu", "1400")}
SMALL = 64  # bytes of a datagram


class Tunnel:
    """Both ends up."""

    def __init__(self, spaces: tuple[Namespace, Namespace], directory: Path, arguments: tuple[str, ...]) -> None:
        port = free_port()
        here = {"listen_ip": CABLE[0]}, {"target_host": CABLE[0]}
        configs = (
            write_config(directory / "a", [server(port, **here[0])]),
            write_config(directory / "b", [client(port, **here[1])]),
        )
        program = [sys.executable, "-m", "rnsfast.cli", "tun"]
        hashes = [
            subprocess.run(
                [*program, "id", "--config", str(c)], capture_output=True, text=True, check=True
            ).stdout.strip()
            for c in configs
        ]
        self.processes: list[subprocess.Popen[str]] = []
        for space, config, peer, address in zip(spaces, configs, reversed(hashes), INSIDE, strict=True):
            command = [*space.command(*program), "up", "--config", str(config), "--peer", peer, "--device", "rf0"]
            command += ["--address", f"{address}/24", *arguments]
            self.processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        for process in self.processes:
            assert process.stdout is not None
            while "up: " not in (line := process.stdout.readline()):
                if not line:
                    raise RuntimeError("an end of the tunnel did not come up")

    def cpu(self) -> float:
        """Seconds that both ends have used."""
        total = 0
        for process in self.processes:  # `ip netns exec` becomes the program
            for task in Path(f"/proc/{process.pid}/task").iterdir():
                total += int((task / "schedstat").read_text().split()[0])
        return total / 1e9

    def close(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def sockets(
    spaces: tuple[Namespace, Namespace], addresses: tuple[str, str], kind: int
) -> tuple[socket.socket, socket.socket]:
    """A sender in the first namespace and a receiver in the second, connected."""
    with spaces[1].inside():
        inbox = socket.socket(socket.AF_INET, kind)
    with spaces[0].inside():
        out = socket.socket(socket.AF_INET, kind)
    for sock in (inbox, out):
        sock.settimeout(PATIENCE)
    inbox.bind((addresses[1], 0))
    if kind == socket.SOCK_DGRAM:
        inbox.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
        out.connect(inbox.getsockname())
        return out, inbox
    with inbox:
        inbox.listen(1)
        out.connect(inbox.getsockname())
        arrived, _ = inbox.accept()
    arrived.settimeout(PATIENCE)
    return out, arrived


def throughput(out: socket.socket, arrived: socket.socket, size: int) -> float:
    """MB/s of a TCP connection."""

    def send() -> None:
        chunk, left = bytes(256 << 10), size
        while left:
            out.sendall(chunk[: min(left, len(chunk))])
            left -= min(left, len(chunk))

    sender = threading.Thread(target=send)
    began = time.perf_counter()
    sender.start()
    buffer, got = bytearray(1 << 20), 0
    while got < size:
        count = arrived.recv_into(buffer)
        if not count:
            raise RuntimeError("the connection ended early")
        got += count
    sender.join()
    return size / (time.perf_counter() - began) / MB


def round_trips(out: socket.socket, arrived: socket.socket, count: int) -> list[float]:
    """Microseconds of a byte there and back."""
    for sock in (out, arrived):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stop = threading.Event()

    def echo() -> None:
        while not stop.is_set():
            data = arrived.recv(100)
            if not data:
                return
            arrived.sendall(data)

    thread = threading.Thread(target=echo, daemon=True)
    thread.start()
    found = []
    for _ in range(count):
        began = time.perf_counter()
        out.sendall(b"x")
        out.recv(100)
        found.append((time.perf_counter() - began) * 1e6)
    stop.set()
    out.shutdown(socket.SHUT_WR)
    thread.join()
    return found


def datagrams(out: socket.socket, inbox: socket.socket, seconds: float) -> tuple[float, float]:
    """Small datagrams as fast as they can be sent: delivered a second, and the share that was lost."""
    inbox.settimeout(0.5)
    got = 0

    def count() -> None:
        nonlocal got
        with contextlib.suppress(TimeoutError):
            while True:
                inbox.recv(100)
                got += 1

    reader = threading.Thread(target=count)
    reader.start()
    packet, sent, end = bytes(SMALL), 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        for _ in range(16):
            with contextlib.suppress(OSError):
                out.send(packet)
            sent += 1
    reader.join()
    return got / seconds, 1 - got / sent


@contextlib.contextmanager
def way(name: str) -> Iterator[tuple[tuple[Namespace, Namespace], tuple[str, str], Tunnel | None]]:
    arguments = WAYS[name]
    with namespace() as left, namespace() as right, tempfile.TemporaryDirectory(prefix="rnsfast-bench-") as directory:
        join(left, right, f"{CABLE[0]}/24", f"{CABLE[1]}/24")
        tunnel = None if arguments is None else Tunnel((left, right), Path(directory), arguments)
        try:
            yield (left, right), (CABLE if tunnel is None else INSIDE), tunnel
        finally:
            if tunnel is not None:
                tunnel.close()


def measure(name: str, quick: bool) -> dict[str, tuple[float, str]]:
    found: dict[str, tuple[float, str]] = {}
    size = (20 if quick else 100) * MB * (10 if name == "cable" else 1)
    with way(name) as (spaces, addresses, tunnel):
        for sock in (pair := sockets(spaces, addresses, socket.SOCK_STREAM)):
            sock.setblocking(True)
        throughput(*pair, 2 * MB)
        used = 0.0 if tunnel is None else tunnel.cpu()
        found["tcp"] = (throughput(*pair, size), "MB/s")
        if tunnel is not None:
            found["cpu, both ends"] = ((tunnel.cpu() - used) / (size / MB) * 1e3, "ms/MB")
        for sock in pair:
            sock.close()
        pair = sockets(spaces, addresses, socket.SOCK_STREAM)
        trips = sorted(round_trips(*pair, 300 if quick else 1500))
        found["round trip p50"] = (trips[len(trips) // 2], "us")
        found["round trip p99"] = (trips[int(len(trips) * 0.99)], "us")
        for sock in pair:
            sock.close()
        pair = sockets(spaces, addresses, socket.SOCK_DGRAM)
        rate, lost = datagrams(*pair, 1.0 if quick else 3.0)
        found["64-byte datagrams delivered"] = (rate, "1/s")
        found["64-byte datagrams lost"] = (100 * lost, "%")
        for sock in pair:
            sock.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one run of smaller transfers, under 50 s")
    parser.add_argument("--runs", type=int, help="default 5, or 1 with --quick")
    parser.add_argument("--json", type=Path, help="write rows and ratios here")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    if reason := obstacle():
        print(f"nothing measured: {reason}")
    else:
        results: dict[str, list[dict[str, tuple[float, str]]]] = {name: [] for name in WAYS}
        for _ in range(options.runs or (1 if options.quick else 5)):
            for name in WAYS:
                results[name].append(measure(name, options.quick))
        median = {
            (name, metric): statistics.median(run[metric][0] for run in runs)
            for name, runs in results.items()
            for metric in runs[0]
        }
        print("| | " + " | ".join(WAYS) + " |\n|---|" + "---:|" * len(WAYS))
        for metric, (_, unit) in results["tunnel"][0].items():
            cells = [f"{median[name, metric]:,.1f}" if (name, metric) in median else "" for name in WAYS]
            print(f"| {metric}, {unit} | " + " | ".join(cells) + " |")
        for (name, metric), value in median.items():
            unit = results[name][0][metric][1]
            rows.append({"workload": "tunnel", "mtu": "1400" if "1400" in name else "link", "pair": name,
                         "metric": metric, "value": value, "unit": unit})  # fmt: skip
        for name in list(WAYS)[1:]:
            ratios[f"tcp, {name} : cable"] = median[name, "tcp"] / median["cable", "tcp"]
            ratios[f"round trip p50, {name} : cable"] = (
                median[name, "round trip p50"] / median["cable", "round trip p50"]
            )
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "ratios": ratios}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
