#!/usr/bin/env python3
"""An IP tunnel over a link beside the cable it runs on: TCP throughput, round trips, datagrams, processor time.

    tunnel.py [--quick] [--runs N] [--json FILE]

Two network namespaces joined by a veth pair, made and removed here, and a process of `rnsfast tun up` in each; the
carrier is TCP over the pair. Measured over the bare pair and through the tunnel, with the MTU that the link gives and
with 1400; the three take turns.

    tcp            one connection, one way: MB/s, and processor time of both ends of the tunnel a MB
    round trip     one byte over TCP, there and back: p50, p99
    udp            datagrams of 64 and 1200 bytes as fast as they can be sent: delivered a second, share that was lost,
                   processor time of both ends for each that arrived

The sender is a process of its own. Medians of the runs. Needs root and /dev/net/tun.
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
WAYS = {"veth": None, "tunnel": (), "tunnel, mtu 1400": ("--mtu", "1400")}
DATAGRAMS = (64, 1200)  # bytes
RCVBUFFORCE = 33  # SO_RCVBUFFORCE: beyond what an ordinary user may have
QUIET = 0.5  # seconds without a datagram after the last was sent: the rest is lost


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


@contextlib.contextmanager
def connected(
    spaces: tuple[Namespace, Namespace], addresses: tuple[str, str], kind: int
) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A sender in the first namespace and a receiver in the second, blocking."""
    with contextlib.ExitStack() as stack:
        pair = sockets(spaces, addresses, kind)
        for sock in pair:
            stack.enter_context(sock)
            sock.setblocking(True)
        yield pair


def sockets(
    spaces: tuple[Namespace, Namespace], addresses: tuple[str, str], kind: int
) -> tuple[socket.socket, socket.socket]:
    """The two, connected."""
    with spaces[1].inside():
        inbox = socket.socket(socket.AF_INET, kind)
    with spaces[0].inside():
        out = socket.socket(socket.AF_INET, kind)
    for sock in (inbox, out):
        sock.settimeout(PATIENCE)
    inbox.bind((addresses[1], 0))
    if kind == socket.SOCK_DGRAM:
        inbox.setsockopt(socket.SOL_SOCKET, RCVBUFFORCE, 8 << 20)  # what is lost is lost on the way
        out.connect(inbox.getsockname())
        return out, inbox
    with inbox:
        inbox.listen(1)
        out.connect(inbox.getsockname())
        arrived, _ = inbox.accept()
    arrived.settimeout(PATIENCE)
    return out, arrived


class Sender:
    """This file as a process that sends on a socket it inherits."""

    def __init__(self, sock: socket.socket, kind: str, *arguments: object) -> None:
        command = [sys.executable, __file__, "--send", kind, str(sock.fileno()), *map(str, arguments)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=[sock.fileno()]
        )
        assert self.process.stdout is not None
        self.process.stdout.readline()  # it is there

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def result(self) -> int:
        """How much it sent."""
        out, _ = self.process.communicate(timeout=PATIENCE)
        return int(out)

    @property
    def is_done(self) -> bool:
        return self.process.poll() is not None


def send(kind: str, descriptor: int, amount: float, size: int) -> int:
    """The sender's side: `amount` is bytes, or seconds for datagrams."""
    print("ready", flush=True)
    sys.stdin.readline()
    sock, sent = socket.socket(fileno=descriptor), 0
    if kind == "stream":
        sock.setblocking(True)
        chunk = bytes(size)
        while sent < amount:
            sock.sendall(chunk)
            sent += size
    else:
        sock.setblocking(True)
        packet, end = bytes(size), time.perf_counter() + amount
        while time.perf_counter() < end:
            for _ in range(16):
                with contextlib.suppress(OSError):
                    sock.send(packet)
                sent += 1
    print(sent)
    return 0


def throughput(out: socket.socket, arrived: socket.socket, size: int) -> float:
    """MB/s of a TCP connection."""
    sender = Sender(out, "stream", size, MB // 4)
    buffer, got = bytearray(1 << 20), 0
    began = time.perf_counter()
    sender.go()
    while got < size:
        count = arrived.recv_into(buffer)
        if not count:
            raise RuntimeError("the connection ended early")
        got += count
    took = time.perf_counter() - began
    sender.result()
    return size / took / MB


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


def datagrams(out: socket.socket, inbox: socket.socket, seconds: float, size: int) -> tuple[float, float]:
    """As fast as they can be sent: delivered a second, and the share that was lost."""
    inbox.settimeout(QUIET)
    sender = Sender(out, "datagrams", seconds, size)
    got, receive = 0, inbox.recv
    sender.go()
    while True:
        try:
            receive(size)
            got += 1
        except TimeoutError:
            if sender.is_done:
                break
    return got / seconds, 1 - got / sender.result()


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


Found = dict[tuple[str, str], tuple[float, str]]  # (workload, metric): value, unit


def measure(name: str, quick: bool) -> Found:
    found: Found = {}
    size = (20 if quick else 100) * MB * (10 if name == "veth" else 1)
    with way(name) as (spaces, addresses, tunnel):
        with connected(spaces, addresses, socket.SOCK_STREAM) as pair:
            throughput(*pair, 2 * MB)
            used = 0.0 if tunnel is None else tunnel.cpu()
            found["tcp", "throughput"] = (throughput(*pair, size), "MB/s")
            if tunnel is not None:
                found["tcp", "processor time of both ends"] = ((tunnel.cpu() - used) / (size / MB) * 1e3, "ms/MB")
        with connected(spaces, addresses, socket.SOCK_STREAM) as pair:
            trips = sorted(round_trips(*pair, 300 if quick else 1500))
            found["round trip", "p50"] = (trips[len(trips) // 2], "us")
            found["round trip", "p99"] = (trips[int(len(trips) * 0.99)], "us")
        for length in DATAGRAMS:
            with connected(spaces, addresses, socket.SOCK_DGRAM) as pair:
                used, seconds = 0.0 if tunnel is None else tunnel.cpu(), 1.0 if quick else 3.0
                rate, lost = datagrams(*pair, seconds, length)
                found[f"udp, {length} bytes", "delivered"] = (rate, "1/s")
                found[f"udp, {length} bytes", "lost"] = (100 * lost, "%")
                if tunnel is not None:
                    each = (tunnel.cpu() - used) / max(1.0, rate * seconds) * 1e6
                    found[f"udp, {length} bytes", "processor time of both ends"] = (each, "us")
    return found


def report(results: dict[str, list[Found]]) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Print the medians; rows and ratios for the file."""
    median = {
        (name, *key): statistics.median(run[key][0] for run in runs)
        for name, runs in results.items()
        for key in runs[0]
    }
    print("| | " + " | ".join(WAYS) + " |\n|---|" + "---:|" * len(WAYS))
    for (workload, metric), (_, unit) in results["tunnel"][0].items():
        cells = (f"{median[key]:,.1f}" if (key := (name, workload, metric)) in median else "" for name in WAYS)
        print(f"| {workload}: {metric}, {unit} | " + " | ".join(cells) + " |")
    rows = [
        {
            "workload": workload,
            "mtu": {"veth": "1500", "tunnel": "link"}.get(name, "1400"),
            "pair": name,
            "metric": metric,
            "value": value,
            "unit": results[name][0][workload, metric][1],
        }
        for (name, workload, metric), value in median.items()
    ]
    ratios = {
        f"{workload} {metric}, {name} : veth": median[name, workload, metric] / median["veth", workload, metric]
        for name in list(WAYS)[1:]
        for workload, metric in (("tcp", "throughput"), ("round trip", "p50"))
    }
    return rows, ratios


def main() -> int:
    if sys.argv[1:2] == ["--send"]:
        return send(sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]))
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
        results: dict[str, list[Found]] = {name: [] for name in WAYS}
        for _ in range(options.runs or (1 if options.quick else 5)):
            for name in WAYS:
                results[name].append(measure(name, options.quick))
        rows, ratios = report(results)
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "ratios": ratios}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
