"""What this machine does with packets: `python -m rnsfast.osio.selftest`.  Protocol 09, section 14.4.

Prints the system, the back end that is chosen for each kind of descriptor with its bounds and what it had to give up,
and a benchmark over the loopback in three rounds: one packet a call, batches, one packet a call. RNSFAST_EXPECT in the
environment names back ends, with commas between, that have to be among the chosen ones; the exit status is 1 if one is
not, and if a packet arrives that was not sent.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Final

from rnsfast.osio.backend import bounds, datagram_socket, open_backend
from rnsfast.osio.contract import BatchIO, Kind, Peer, RxBatch, TxState
from rnsfast.osio.device import DeviceError, TunDevice, open_tun
from rnsfast.osio.peers import make_peer

SECONDS: Final = 10.0  # for all rounds of a benchmark together
ROUNDS: Final = ("one by one", "batch", "one by one")
BURST: Final = 32  # packets; no queue of any system is too short for them
SIZE: Final = 500  # bytes a packet, the MTU of the network
PATIENCE: Final = 0.2  # seconds without a packet after which the rest of a burst is lost

#: Network of the device in its benchmark, one of those set apart for measuring (RFC 2544).
NETWORK: Final = "198.18.77"

Report = dict[str, Any]


def describe_system() -> Report:
    return {
        "system": platform.system(),
        "release": platform.release(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "RNSFAST_OSIO": os.environ.get("RNSFAST_OSIO", ""),
    }


def describe_backend(io: BatchIO, kind: Kind) -> Report:
    """Name, bounds, and which calls were given up for what reason."""
    default, lowest, highest = bounds(kind)
    caps = io.caps
    return {
        "backend": caps.backend,
        "max_rx": caps.max_rx,
        "max_tx": caps.max_tx,
        "bounds": {"default": default, "lowest": lowest, "highest": highest},
        "pollable": caps.pollable,
        "runs of": caps.run_tx,
        "fallbacks": dict(getattr(io, "fallbacks", {})),
    }


# -- rounds -----------------------------------------------------------------------------------------------------------


def measure(
    io: BatchIO, emit: Callable[[bool], int], mine: Callable[[memoryview], bool], seconds: float
) -> list[Report]:
    """Three rounds of bursts.

    Args:
        io: receives.
        emit: sends one burst, in one call if its argument says so; how many packets that were.
        mine: whether a packet is one of them.
    """
    like = io.make_batch()
    rounds = []
    for way in ROUNDS:
        batched = way == "batch"
        batch = like if batched else RxBatch(1, like.slot)
        sent = got = foreign = 0
        start = time.perf_counter()
        while (passed := time.perf_counter() - start) < seconds / len(ROUNDS):
            expected = emit(batched)
            sent += expected
            while expected > 0 and (count := io.recv(batch, PATIENCE)):
                good = sum(mine(batch.data(i)) for i in range(count))
                foreign += count - good
                expected -= good
                got += good
        rounds.append(
            {
                "way": way,
                "packets": got,
                "lost": sent - got,
                "foreign": foreign,
                "packets_per_second": round(got / passed),
            }
        )
    return rounds


def measure_datagrams(seconds: float) -> tuple[list[Report], Report, Report]:
    """The rounds over UDP on the loopback, and what the connected and the unconnected socket got."""
    with ExitStack() as stack:
        socks = [datagram_socket(socket.AF_INET) for _ in range(2)]
        for sock in socks:
            sock.bind(("127.0.0.1", 0))
        ports = [sock.getsockname()[1] for sock in socks]
        socks[0].connect(("127.0.0.1", ports[1]))
        sender, receiver = (open_backend(Kind.DATAGRAM, sock) for sock in socks)
        stack.callback(sender.close)
        stack.callback(receiver.close)
        items = [bytes([i]) * SIZE for i in range(BURST)]
        known = set(items)

        def emit(batched: bool) -> int:
            return send_all(sender, items, None) if batched else sum(sender.send_one(item).sent for item in items)

        rounds = measure(receiver, emit, lambda packet: bytes(packet) in known, seconds)
        # One burst to a peer, which is how an unconnected socket sends.
        back = make_peer("127.0.0.1", ports[0])
        answered = send_all(receiver, items, back)
        batch, got = sender.make_batch(), 0
        while got < answered and (count := sender.recv(batch, PATIENCE)):
            got += count
        unconnected = {**describe_backend(receiver, Kind.DATAGRAM), "answers": got}
        return rounds, describe_backend(sender, Kind.DATAGRAM), unconnected


def send_all(io: BatchIO, items: Sequence[bytes], peer: Peer | None) -> int:
    """One burst in as few calls as the system allows; how many packets it took."""
    at = sent = 0
    while True:
        result = io.send(items, peer, at)
        at, sent = result.taken, sent + result.sent
        if result.state is not TxState.BLOCKED or not io.wait(PATIENCE, read=False, write=True):
            return sent


def measure_device(device: TunDevice, sock: socket.socket, seconds: float) -> list[Report]:
    """The rounds for packets that this machine sends into a device, by `sock`, and that are read from it."""
    device.add_address(f"{NETWORK}.1/24")
    device.up()
    where, target = (f"{NETWORK}.2", 9), socket.inet_aton(f"{NETWORK}.2")
    items = [bytes([i]) * (SIZE - 28) for i in range(BURST)]  # without the headers

    def emit(_batched: bool) -> int:
        return sum(1 for item in items if sock.sendto(item, where))

    return measure(device.io, emit, lambda packet: packet[16:20] == target, seconds)


# -- the whole ----------------------------------------------------------------------------------------------------


def run(seconds: float) -> Report:
    """Everything there is to know."""
    report: Report = {"system": describe_system(), "backends": {}, "benchmarks": {}}
    backends, benchmarks = report["backends"], report["benchmarks"]
    left, right = socket.socketpair()
    with right:
        stream = open_backend(Kind.STREAM, left)
        backends["stream"] = describe_backend(stream, Kind.STREAM)
        stream.close()
    benchmarks["udp"], backends["datagram, connected"], backends["datagram"] = measure_datagrams(seconds)
    try:
        device = open_tun(None)
    except DeviceError as error:
        backends["tun"] = {"backend": None, "reason": str(error)}
        benchmarks["tun"] = f"skipped: {error}"
        return finish(report)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            benchmarks["tun"] = measure_device(device, sock, seconds)
    except (DeviceError, OSError) as error:
        benchmarks["tun"] = f"skipped: {error}"
    finally:
        backends["tun"] = {**describe_backend(device.io, Kind.TUN), "name": device.name}
        device.close()
    return finish(report)


def finish(report: Report) -> Report:
    """What was expected and did not come."""
    expected = [name for name in os.environ.get("RNSFAST_EXPECT", "").split(",") if name]
    chosen = {entry["backend"] for entry in report["backends"].values()}
    problems = [f"{name} was expected and not chosen" for name in expected if name not in chosen]
    problems += [
        f"{name} was expected, and gave up {call}: {reason}"
        for entry in report["backends"].values()
        for name in expected
        if entry["backend"] == name
        for call, reason in entry["fallbacks"].items()
    ]
    udp = report["benchmarks"]["udp"]
    if any(entry["foreign"] for entry in udp):
        problems.append("packets arrived over the loopback that were not sent")
    if not all(entry["packets"] for entry in udp):
        problems.append("no packets arrived over the loopback")
    report["expected"], report["problems"] = expected, problems
    return report


def show(report: Report) -> None:
    system = report["system"]
    print(" ".join(str(value) for value in system.values() if value))
    for kind, entry in report["backends"].items():
        if entry["backend"] is None:
            print(f"{kind}: none: {entry['reason']}")
            continue
        limits = entry["bounds"]
        print(
            f"{kind}: {entry['backend']}, {entry['max_rx']} packets a receive, {entry['max_tx']} a send"
            f" (default {limits['default']}, {limits['lowest']}..{limits['highest']})"
        )
        for call, reason in entry["fallbacks"].items():
            print(f"    without {call}: {reason}")
    for name, rounds in report["benchmarks"].items():
        if isinstance(rounds, str):
            print(f"{name}: {rounds}")
            continue
        print(f"{name}, {SIZE} bytes, bursts of {BURST}:")
        for entry in rounds:
            print(f"    {entry['way']:<10} {entry['packets_per_second']:>9,} packets/s, {entry['lost']} lost")
    for problem in report["problems"]:
        print(f"PROBLEM: {problem}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m rnsfast.osio.selftest", description="What this machine does.")
    parser.add_argument("--json", metavar="FILE", help="also write everything to FILE")
    parser.add_argument("--seconds", type=float, default=SECONDS, metavar="N", help="for each benchmark (default 10)")
    chosen = parser.parse_args(arguments)
    report = run(chosen.seconds)
    show(report)
    if chosen.json:
        with open(chosen.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=2)
            file.write("\n")
    return 1 if report["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
