#!/usr/bin/env python3
"""A relay between two connections: rnsfast beside the reference, the same wire driver on both sides, in one run.

    relay.py [--quick] [--runs N] [--json FILE] [--interface tcp|backbone] [--only WORD ...]

The driver plays both ends with packets that were made before, so that what is measured is the relay: a process with a
listening interface, transport enabled, and two connections. One end announces a destination, the other asks for a link
to it through the relay, the first proves it; from then on link packets run through.

    forward       frames of 240 bytes and 8 KiB, at most WINDOW under way: frames and MB a second, CPU a frame
    latency       one frame at a time: added latency
    announces     new destinations announced on a third connection at a fixed rate: how many came out again and CPU for
                  each, while the link is quiet; and the latency of the link in a second such storm

CPU is the relay's own, user and system. Every figure is the median of the runs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))

from interop.harness import SERVERS, free_port, stock_python, write_config  # noqa: E402
from rnsfast.crypto.ed25519 import SigningKey  # noqa: E402
from rnsfast.crypto.identity import Identity  # noqa: E402
from rnsfast.wire.announce import Announce, build_announce, random_blob, signed_data  # noqa: E402
from rnsfast.wire.handshake import (  # noqa: E402
    MODE_AES256_CBC,
    LinkRequest,
    build_link_proof,
    build_link_request,
    encode_signalling,
    link_proof_signed_data,
)
from rnsfast.wire.hdlc import HdlcDecoder, encode  # noqa: E402
from rnsfast.wire.names import destination_hash, name_hash  # noqa: E402
from rnsfast.wire.packet import (  # noqa: E402
    ANNOUNCE,
    CTX_CHANNEL,
    CTX_LRPROOF,
    CTX_NONE,
    DATA,
    LINK,
    LINKREQUEST,
    PROOF,
    link_id,
    make_raw,
)

SIDES = ("ours", "rns")
WINDOW = 512  # frames under way: the reference drops what is beyond 1,024
BURST = 64  # frames a write
PATIENCE = 30.0  # seconds for one step
SIZES = {"240 bytes": 240, "8 KiB": 8192}


class End:
    """One connection to the relay: frames in and out."""

    def __init__(self, port: int) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), PATIENCE)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._decoder = HdlcDecoder(1 << 20)
        self._ready: list[bytes] = []

    def send(self, *packets: bytes) -> None:
        self.sock.sendall(b"".join(map(encode, packets)))

    def receive(self, wanted: Callable[[bytes], bool]) -> bytes:
        """The next packet that is `wanted`; others are thrown away."""
        end = time.monotonic() + PATIENCE
        while True:
            while self._ready:
                packet = self._ready.pop(0)
                if wanted(packet):
                    return packet
            self.sock.settimeout(max(0.01, end - time.monotonic()))
            data = self.sock.recv(1 << 18)
            if not data:
                raise RuntimeError("the relay closed the connection")
            self._ready += self._decoder.feed(memoryview(data))

    def close(self) -> None:
        self.sock.close()


class Relay:
    """A relay process, and what it has used."""

    def __init__(self, side: str, interface: str, directory: Path, **more: object) -> None:
        self.port = free_port()
        self.identity = Identity()
        options = {"ingress_control": False, "announce_cap": 100, "announce_rate_target": 3600, **more}
        config = write_config(directory, [SERVERS[interface](self.port, **options)], transport=True)
        (directory / "storage").mkdir(mode=0o700)
        self.identity.save(directory / "storage" / "transport_identity")
        if side == "ours":
            command = [sys.executable, "-m", "rnsfast.cli", "node", "--config", str(config)]
            sign = "running"
        else:
            command = [stock_python(), str(HERE.parent.parent / "interop" / "stock_peer.py"), "--config", str(config)]
            sign = "ready"
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if sign in line:
                break
        else:
            raise RuntimeError(f"the {side} relay did not start")
        threading.Thread(target=self.process.stdout.read, daemon=True).start()

    def cpu(self) -> float:
        """Seconds of processor time so far."""
        tasks = Path(f"/proc/{self.process.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9

    def rss(self) -> int:
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS"):
                return int(line.split()[1]) * 1024
        return 0

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def announce(identity: Identity, name: str, unix_time: float) -> tuple[bytes, bytes]:
    """Destination hash, and the packet that announces it."""
    name_part = name_hash("bench", name)
    destination = destination_hash(name_part, identity.hash)
    made = Announce(
        destination, identity.public_key, name_part, random_blob(os.urandom(5), int(unix_time)), None, b"", None
    )
    data = build_announce(made, identity.sign(signed_data(made)))
    return destination, make_raw(ANNOUNCE, destination, CTX_NONE, data)


class Bridge:
    """A link through the relay, from `near` to `far`."""

    def __init__(self, relay: Relay) -> None:
        self.relay = relay
        self.near, self.far = End(relay.port), End(relay.port)
        identity = Identity()
        destination, packet = announce(identity, "far", time.time())
        self.destination = destination
        self.far.send(packet)
        self.near.receive(lambda raw: raw[0] & 3 == ANNOUNCE and destination in raw[:34])
        exchange, signing = os.urandom(32), SigningKey(os.urandom(32))
        request = build_link_request(LinkRequest(exchange, signing.public, 16384, MODE_AES256_CBC))
        direct = make_raw(LINKREQUEST, destination, CTX_NONE, request)
        identifier = self.link = link_id(direct)
        self.near.send(bytes((0x50 | direct[0], 0)) + relay.identity.hash + direct[2:])
        arrived = self.far.receive(lambda raw: raw[0] & 3 == LINKREQUEST)
        signalling = arrived[-3:] if len(arrived) == 19 + 67 else b""
        key = os.urandom(32)
        signed = link_proof_signed_data(identifier, key, identity.signing.public, signalling)
        proof = build_link_proof(identity.sign(signed), key, signalling)
        self.far.send(make_raw(LINK << 2 | PROOF, identifier, CTX_LRPROOF, proof))
        self.near.receive(lambda raw: raw[0] & 3 == PROOF and identifier in raw[:18])
        assert signalling == encode_signalling(16384, MODE_AES256_CBC)

    def frame(self, size: int, seed: int) -> bytes:
        """A channel packet with `size` bytes of ciphertext that needs no escapes, so that flags can be counted."""
        body = random.Random(seed).randbytes(size).replace(b"\x7e", b"\x00").replace(b"\x7d", b"\x01")
        return encode(make_raw(LINK << 2 | DATA, self.link, CTX_CHANNEL, body))

    def forward(self, size: int, count: int) -> dict[str, float]:
        """Push `count` frames through, WINDOW at most under way."""
        frames = [self.frame(size, n) for n in range(BURST)]
        flags = frames[0].count(b"\x7e")  # two, and those in the link id if it has any
        burst = b"".join(frames)
        arrived, changed = [0], threading.Condition()
        done = threading.Event()

        def count_frames() -> None:
            seen = 0
            self.far.sock.settimeout(PATIENCE)
            while arrived[0] < count:
                data = self.far.sock.recv(1 << 19)
                if not data:
                    break
                seen += data.count(b"\x7e")
                with changed:
                    arrived[0] = seen // flags
                    changed.notify()
            done.set()

        reader = threading.Thread(target=count_frames)
        cpu, began = self.relay.cpu(), time.perf_counter()
        reader.start()
        for sent in range(0, count, BURST):
            with changed:
                if not changed.wait_for(lambda sent=sent: sent - arrived[0] <= WINDOW - BURST, PATIENCE):
                    raise RuntimeError(f"{arrived[0]} of {sent} frames came through")
            self.near.sock.sendall(burst)
        if not done.wait(PATIENCE):
            raise RuntimeError(f"{arrived[0]} of {count} frames came through")
        took = time.perf_counter() - began
        reader.join()
        used = self.relay.cpu() - cpu
        return {
            "frames": count / took, "throughput": count * size / took / 1e6, "cpu": used / count * 1e6,
            "rss": self.relay.rss(),
        }  # fmt: skip

    def latency(self, count: int, pause: float = 0.0, stop: threading.Event | None = None) -> list[float]:
        """Seconds from one end to the other, one frame at a time; what else arrives is ignored."""
        frame = self.frame(240, 0)
        decoder = HdlcDecoder(1 << 20)
        packet = HdlcDecoder(1 << 20).feed(memoryview(frame))[0][18:]
        found: list[float] = []
        self.far.sock.settimeout(PATIENCE)
        while len(found) < count and not (stop is not None and stop.is_set()):
            began = time.perf_counter()
            self.near.sock.sendall(frame)
            there = False
            while not there:
                data = self.far.sock.recv(1 << 18)
                if not data:
                    raise RuntimeError("the relay closed the connection")
                there = any(raw[18:] == packet for raw in decoder.feed(memoryview(data)))
            found.append(time.perf_counter() - began)
            if pause:
                time.sleep(pause)
        return found

    def close(self) -> None:
        self.near.close()
        self.far.close()


@contextmanager
def bridge(side: str, interface: str) -> Iterator[Bridge]:
    with tempfile.TemporaryDirectory(prefix="rnsfast-bench-") as directory:
        relay = Relay(side, interface, Path(directory))
        try:
            made = Bridge(relay)
            try:
                yield made
            finally:
                made.close()
        finally:
            relay.stop()


def storm(made: Bridge, count: int, rate: float, *, sampled: bool) -> dict[str, float]:
    """Announce `count` new destinations at `rate` a second: how many come out again, and how the link does."""
    now = time.time()
    packets = [announce(Identity(), str(n), now)[1] for n in range(count)]
    wanted = {packet[2:18] for packet in packets}
    source, listener = End(made.relay.port), End(made.relay.port)
    heard: set[bytes] = set()
    over = threading.Event()

    def listen() -> None:
        decoder = HdlcDecoder(1 << 20)
        listener.sock.settimeout(0.2)
        while not over.is_set() and len(heard) < count:
            try:
                data = listener.sock.recv(1 << 18)
            except TimeoutError:
                continue
            for raw in decoder.feed(memoryview(data)):
                if raw[0] & 0x43 == 0x41 and raw[18:34] in wanted:
                    heard.add(raw[18:34])

    drain_stop = threading.Event()
    ear = threading.Thread(target=listen)
    ear.start()
    # What comes back on the connections of the link must not fill their buffers.
    quiet = made.latency(400, 0.005) if sampled else []
    near_drain = threading.Thread(target=_drain, args=(made.near.sock, drain_stop))
    near_drain.start()
    busy: list[float] = []
    sampling = threading.Event()
    sampler = threading.Thread(target=lambda: busy.extend(made.latency(1 << 30, 0.005, sampling)))
    cpu = made.relay.cpu()
    if sampled:
        sampler.start()
    began = time.perf_counter()
    for n, packet in enumerate(packets):
        late = began + n / rate - time.perf_counter()
        if late > 0.001:
            time.sleep(late)
        source.sock.sendall(encode(packet))
    sampling.set()
    if sampled:
        sampler.join()
    ear.join(12)
    over.set()
    ear.join()
    used = made.relay.cpu() - cpu
    drain_stop.set()
    near_drain.join()
    source.close()
    listener.close()
    return {
        "absorbed": len(heard) / count, "cpu": used / max(1, len(heard)) * 1e6,
        "idle p50": _quantile(quiet, 0.5), "idle p99": _quantile(quiet, 0.99),
        "storm p50": _quantile(busy, 0.5), "storm p99": _quantile(busy, 0.99),
    }  # fmt: skip


def _drain(sock: socket.socket, stop: threading.Event) -> None:
    sock.settimeout(0.2)
    while not stop.is_set():
        try:
            if not sock.recv(1 << 18):
                return
        except TimeoutError:
            continue


def _quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1e6 if ordered else float("nan")


def measure(side: str, options: argparse.Namespace) -> dict[tuple[str, str], tuple[float, str]]:
    """One run of one side: (workload, metric) -> value and unit."""
    found: dict[tuple[str, str], tuple[float, str]] = {}
    scale = 1 if options.quick else 4
    with bridge(side, options.interface) as made:
        for name, size in SIZES.items():
            if wanted(options, f"forward {name}"):
                made.forward(size, BURST * 64)
                result = made.forward(size, BURST * (800 if size < 1000 else 200) * scale)
                workload = f"forward {name}"
                found[workload, "frames"] = (result["frames"], "1/s")
                found[workload, "throughput"] = (result["throughput"], "MB/s")
                found[workload, "cpu a frame"] = (result["cpu"], "us")
                found[workload, "rss"] = (result["rss"], "bytes")
        if wanted(options, "latency"):
            made.latency(100)
            samples = made.latency(500 * scale)
            found["latency", "p50"] = (_quantile(samples, 0.5), "us")
            found["latency", "p99"] = (_quantile(samples, 0.99), "us")
        if wanted(options, "announces"):
            result = storm(made, 1500 * scale, 1000.0, sampled=False)
            found["announces", "share absorbed"] = (result["absorbed"], "")
            found["announces", "cpu for each"] = (result["cpu"], "us")
            result = storm(made, 500 * scale, 300.0, sampled=True)
            for key in ("idle p50", "idle p99", "storm p50", "storm p99"):
                found["announces", f"link latency {key}"] = (result[key], "us")
    return found


def wanted(options: argparse.Namespace, workload: str) -> bool:
    return not options.only or any(word in workload for word in options.only)


#: (workload, metric) whose ratio is reported, and whether more is better.
RATIOS = {
    ("forward 240 bytes", "frames"): True,
    ("forward 8 KiB", "frames"): True,
    ("forward 240 bytes", "cpu a frame"): False,
    ("forward 8 KiB", "cpu a frame"): False,
    ("latency", "p50"): False,
    ("latency", "p99"): False,
    ("announces", "cpu for each"): False,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one run of smaller workloads, under 50 s")
    parser.add_argument("--runs", type=int, help="default 5, or 1 with --quick")
    parser.add_argument("--json", type=Path, help="write rows and ratios here")
    parser.add_argument("--interface", choices=("tcp", "backbone"), default="tcp")
    parser.add_argument("--only", nargs="*", help="workloads with one of these words in their name")
    options = parser.parse_args()
    options.runs = options.runs or (1 if options.quick else 5)
    results: dict[str, list[dict[tuple[str, str], tuple[float, str]]]] = {side: [] for side in SIDES}
    for number in range(options.runs):
        for side in SIDES:
            results[side].append(measure(side, options))
        print(f"run {number + 1} of {options.runs} done", file=sys.stderr, flush=True)
    rows: list[dict[str, Any]] = []
    median: dict[tuple[str, str, str], float] = {}
    for side, runs in results.items():
        for workload, metric in runs[0]:
            value = statistics.median(run[workload, metric][0] for run in runs)
            unit = runs[0][workload, metric][1]
            median[side, workload, metric] = value
            rows.append(
                {"workload": workload, "mtu": "16384", "pair": side, "metric": metric, "value": value, "unit": unit}
            )
    ratios = {
        f"relay, {workload}, {metric}, ours : rns": (
            median["ours", workload, metric] / median["rns", workload, metric]
            if more
            else median["rns", workload, metric] / median["ours", workload, metric]
        )
        for (workload, metric), more in RATIOS.items()
        if ("ours", workload, metric) in median and median["rns", workload, metric] and median["ours", workload, metric]
    }
    if ("ours", "announces", "link latency storm p50") in median:
        for side in SIDES:
            for share in ("p50", "p99"):
                ratios[f"relay, link latency in an announce storm : idle, {share}, {side}"] = (
                    median[side, "announces", f"link latency storm {share}"]
                    / median[side, "announces", f"link latency idle {share}"]
                )
    print("| workload | metric | ours | rns |\n|---|---|---:|---:|")
    for workload, metric in results["ours"][0]:
        unit = results["ours"][0][workload, metric][1]
        print(f"| {workload} | {metric} {unit} | {median['ours', workload, metric]:.5g} | "
              f"{median['rns', workload, metric]:.5g} |")  # fmt: skip
    for name, times in ratios.items():
        print(f"{times:6.2f}x  {name}")
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "ratios": ratios}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
