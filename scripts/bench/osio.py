#!/usr/bin/env python3
"""Packet I/O in batches beside one packet a call: sockets, TUN devices, latency, and delivery under overload.

    osio.py [--quick] [--sweep] [--rounds N] [--json FILE] [--plot FILE] [--only WORD ...] [--sizes N ...]
    osio.py --from FILE [--plot FILE]

Every batched sample stands between two samples of the baseline (A/B/A), and "times one by one" is the median over the
rounds of what the neighbours took, divided by what the sample took. `calls a packet` are system calls. Nothing is lost
in the first three groups, or the rows say so.

    udp send, udp receive, tcp flush    one process over loopback; MTU 65536, so no packet is too large for it
    tun read, tun write, tun echo       a device in a network namespace of its own, MTU 9000; needs root
    ..., busy thread                    beside a thread that computes in Python; what counts is the mean and the worst
    udp echo                            round trips, idle and beside a load of half of what one by one can take
    udp overload                        64-byte packets at 2.5 times what one by one can take, from back end to back
                                        end (raw) and through two nodes (nodes)

`--sweep` prints the tables that the defaults come from, and measures latency and overload with every batch size too.
`--quick` takes under 50 s.
JSON: {"rows": [{"workload", "mtu", "pair", "metric", "value", "unit"}, ...], "ratios": {...}, "notes": [...]}; `mtu` is
the bytes of a packet. `--from` prints and draws what was measured before.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from osio_echo import idle, loaded
from osio_moves import LOADS, Busy, Load, alternate
from osio_overload import MANY, ONE, SWEEP, overload, sweep
from osio_rows import Figures, Row, move_rows
from osio_tun import measure_tun

from rnsfast.osio.memory import keep_heap

SIZES: Final = (64, 431, 1200, 8192)
BATCHES: Final = (8, 16, 32, 64, 128)
DEFAULT: Final = 64  # packets a batch, of the back ends on Linux
BUSY: Final = "udp send, busy thread"
TUN_BUSY: Final = "tun read, busy thread"
TUN: Final = ("tun read", "tun write", TUN_BUSY, "tun echo")
MOVES: Final = (*LOADS, "tun read", "tun write")
WORKLOADS: Final = (*LOADS, BUSY, *TUN, "udp echo", "udp overload, raw", "udp overload, nodes")
LOAD: Final = 40_000.0  # packets a second beside the loaded echo, unless the limit has been measured


def chosen(options: argparse.Namespace) -> list[str]:
    """The workloads to measure."""
    found = [name for name in WORKLOADS if not options.only or any(word in name for word in options.only)]
    if options.quick and not options.only:
        found = [name for name in found if name not in (BUSY, TUN_BUSY)]
    return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All rows."""
    keep_heap()  # as the thread of a node that moves packets does
    rows: list[Row] = []
    notes: list[str] = []
    workloads = chosen(options)

    def done(name: str) -> None:
        print(f"{name} done", file=sys.stderr, flush=True)

    for name in workloads:
        if name in LOADS:
            for size in options.sizes:
                rows += moves(name, LOADS[name](size, options.batches, not options.quick), size, options, notes)
            done(name)
        elif name == BUSY:
            with Busy():
                rows += moves(name, LOADS["udp send"](64, (DEFAULT,), True), 64, options, notes)
            done(name)
    tun = [name for name in workloads if name in TUN]
    if tun:
        wanted: dict[str, Any] = {"sizes": options.sizes, "batches": options.batches, "every_mode": True}
        wanted.update(workloads=tun, rounds=options.rounds, bursts=options.bursts)
        wanted.update(echoes=2 * options.runs, pings=3 * options.pings)
        found, missing = measure_tun(wanted)
        rows += found
        notes += missing
        done("tun")
    limit = 0.0
    for kind in ("raw", "nodes"):
        if f"udp overload, {kind}" in workloads:
            found, measured = overload(kind, options.runs, options.seconds)
            rows += found
            limit = measured if kind == "raw" else limit
            if kind == "raw" and options.sweep:
                rows += sweep(options.batches, options.runs, options.seconds / 3, limit)
            done(f"udp overload, {kind}")
    if "udp echo" in workloads:
        rows += idle(6 * options.runs, options.pings, options.batches if options.sweep else (DEFAULT,))
        rows += loaded(options.runs, 3 * options.pings, DEFAULT, limit / 2 or LOAD)
        done("udp echo")
    return {"rows": rows, "ratios": ratios(Figures(rows)), "notes": list(dict.fromkeys(notes))}


def moves(name: str, load: Load, size: int, options: argparse.Namespace, notes: list[str]) -> list[Row]:
    try:
        notes += load.notes
        return move_rows(name, size, load.baseline, alternate(load, options.rounds, options.bursts))
    finally:
        load.close()


def ratios(figures: Figures) -> dict[str, float]:
    """What the rows say about the aims, as far as they were measured."""
    found: dict[str, float | None] = {}

    def times(workload: str, pair: str, size: int = 64) -> float | None:
        return figures.get(workload, size, pair, "times one by one")

    def saved(value: float | None) -> float | None:
        return None if value is None else 1 - value

    drain = f"drain {DEFAULT}"
    per = "time a packet"
    found["tun_drain_time_saved_64"] = saved(figures.quotient("tun read", 64, per, drain, "drain 1"))
    plain = times("tun read", drain)
    found["tun_drain_time_saved_vs_plain_poll_read_64"] = saved(None if plain is None else 1 / plain)
    portable = times("tun read", f"portable {DEFAULT}")
    found["tun_portable_drain_time_saved_vs_plain_poll_read_64"] = saved(None if portable is None else 1 / portable)
    found["tun_write_batch_vs_one_64"] = figures.quotient("tun write", 64, per, "send_one", f"batch {DEFAULT}")
    found["udp_gso_vs_sendto_64"] = times("udp send", f"gso {DEFAULT}")
    found["udp_gso_vs_sendto_1200"] = times("udp send", f"gso {DEFAULT}", 1200)
    found["udp_sendmmsg_vs_sendto_64"] = times("udp send", f"sendmmsg {DEFAULT}")
    found["udp_send_one_vs_sendto_64"] = times("udp send", "send_one")
    mean = "mean time a packet"
    found["udp_gso_vs_sendto_busy_thread_mean_64"] = figures.quotient(BUSY, 64, mean, "sendto", f"gso {DEFAULT}")
    found["tun_drain_vs_poll_read_busy_thread_mean_64"] = figures.quotient(TUN_BUSY, 64, mean, "poll + read", drain)
    found["udp_recvmmsg_vs_poll_recvfrom_64"] = times("udp receive", f"recvmmsg {DEFAULT}")
    found["udp_gro_vs_poll_recvfrom_64"] = times("udp receive", f"gro {DEFAULT}")
    found["tcp_flush32_vs_single_64"] = times("tcp flush", "flush 32")
    found["tcp_framed_flush32_vs_single_64"] = figures.quotient(
        "tcp flush", 64, per, "frame + send each", "frame + flush 32"
    )
    many = f"batch {DEFAULT}"
    for name, workload in (("idle", "udp echo, idle"), ("loaded", "udp echo, loaded"), ("tun_idle", "tun echo, idle")):
        for percent in (50, 95, 99):
            key = f"{name}_p{percent}_batch_vs_one"
            found[key] = figures.quotient(workload, 64, f"round trip p{percent}", many, "one by one")
    for suffix, kind in (("", "nodes"), ("_raw", "raw")):
        workload = f"udp overload, {kind}"
        found[f"overload_delivered_batch_vs_one_64{suffix}"] = figures.quotient(workload, 64, "delivered", MANY, ONE)
        cpu = figures.quotient(workload, 64, "cpu a bit", MANY, ONE)
        found[f"overload_cpu_per_bit_saved_64{suffix}"] = saved(cpu)
    return {name: value for name, value in found.items() if value is not None}


#: ratio -> the least that it should be
AIMS: Final[dict[str, float]] = {
    "tun_drain_time_saved_64": 0.40,
    "tun_drain_time_saved_vs_plain_poll_read_64": 0.40,
    "udp_gso_vs_sendto_64": 3.0,
    "tcp_flush32_vs_single_64": 6.0,
    "overload_delivered_batch_vs_one_64": 2.0,
}
#: ratio -> whose spread over the rounds it should stay within
NOISE: Final[dict[str, tuple[str, str]]] = {
    "idle_p50_batch_vs_one": ("udp echo, idle", "spread of p50"),
    "idle_p99_batch_vs_one": ("udp echo, idle", "spread of p99"),
}
LITTLE: Final = 0.05  # of a round trip: 1 us; a lone packet costs the system one more look for a second


def verdict(name: str, value: float, figures: Figures) -> str:
    """What to say about a ratio that has an aim."""
    if name in AIMS:
        return f"  aim >= {AIMS[name]:g}: {'met' if value >= AIMS[name] else 'MISSED'}"
    if name in NOISE:
        workload, metric = NOISE[name]
        spread = figures.get(workload, 64, "one by one", metric) or 0.0
        met = value <= 1 + max(spread, LITTLE)
        return f"  aim: within noise, which is {spread:.3f}, or {LITTLE:.0%}: {'met' if met else 'MISSED'}"
    return ""


def table(figures: Figures) -> str:
    """Markdown: the moves with their default batch, then beside a busy thread, then echoes, then overload."""
    sizes = list(dict.fromkeys(size for workload in MOVES for size in figures.sizes(workload)))
    lines = ["| ns a packet of | how | " + " | ".join(f"{size} bytes" for size in sizes)]
    lines[0] += " | at 64: packets a second | CPU, ns a packet | calls a packet |"
    lines.append("|---|---|" + "---:|" * (len(sizes) + 3))
    for workload in MOVES:
        for pair in figures.pairs(workload):
            if pair[-1].isdigit() and int(pair.split()[-1]) not in (1, DEFAULT):
                continue
            cells: list[str] = []
            for size in sizes:
                each = figures.get(workload, size, pair, "time a packet")
                times = figures.get(workload, size, pair, "times one by one")
                cells.append("" if each is None else f"{each:.0f}" if times is None else f"{each:.0f} ({times:.2f}x)")
            first = figures.get(workload, 64, pair, "packets")
            if first is not None:
                cpu = figures.get(workload, 64, pair, "cpu a packet") or 0.0
                calls = figures.get(workload, 64, pair, "calls a packet") or 0.0
                cells += [f"{first:,.0f}", f"{cpu:.0f}", f"{calls:.3f}"]
            lines.append(f"| {workload} | {pair} | " + " | ".join(cells) + " |")
    tables = (lines[2:] and lines, busy_table(figures), echo_table(figures), overload_table(figures))
    return "\n".join(line for part in tables for line in part).strip()


def busy_table(figures: Figures) -> list[str]:
    lines: list[str] = []
    for workload in (BUSY, TUN_BUSY):
        for pair in figures.pairs(workload):
            names = ("time a packet", "mean time a packet", "worst time a packet")
            values = [figures.get(workload, 64, pair, name) or 0.0 for name in names]
            lines.append(f"| {workload} | {pair} | " + " | ".join(f"{value:,.0f}" for value in values) + " |")
    head = ["", "| 64 bytes | how | median, ns a packet | mean | worst sample |", "|---|---|---:|---:|---:|"]
    return [*head, *lines] if lines else []


def echo_table(figures: Figures) -> list[str]:
    lines: list[str] = []
    for workload in ("udp echo, idle", "udp echo, loaded", "tun echo, idle"):
        for pair in figures.pairs(workload):
            values = [figures.get(workload, 64, pair, f"round trip p{percent}") for percent in (50, 95, 99)]
            if None not in values:
                lines.append(f"| {workload} | {pair} | " + " | ".join(f"{value:.1f}" for value in values) + " |")
    head = ["", "| round trips | how | p50, us | p95, us | p99, us |", "|---|---|---:|---:|---:|"]
    return [*head, *lines] if lines else []


def overload_table(figures: Figures) -> list[str]:
    head = "| overload, 64 bytes | how | offered, 1/s | delivered | lost | CPU, ns a bit | calls a packet |"
    lines: list[str] = []
    for kind in ("raw", "nodes"):
        workload = f"udp overload, {kind}"
        for pair in figures.pairs(workload):
            get = {name: figures.get(workload, 64, pair, name) or 0.0 for name in ("offered", "delivered", "lost")}
            cpu = figures.get(workload, 64, pair, "cpu a bit") or 0.0
            calls = figures.get(workload, 64, pair, "calls a packet") or 0.0
            lines.append(
                f"| {kind} | {pair} | {get['offered']:,.0f} | {get['delivered']:.1%} | {get['lost']:.1%} "
                f"| {cpu:.2f} | {calls:.3f} |"
            )
    return ["", head, "|---|---|---:|---:|---:|---:|---:|", *lines] if lines else []


def sweep_table(figures: Figures) -> str:
    """Markdown: time a packet by the size of the batch."""
    lines = ["| ns a packet | bytes | one by one | " + " | ".join(str(batch) for batch in BATCHES) + " |"]
    lines.append("|---|---:|---:|" + "---:|" * len(BATCHES))
    for workload in MOVES:
        pairs = figures.pairs(workload)
        families = dict.fromkeys(pair.rsplit(" ", 1)[0] for pair in pairs if pair[-1].isdigit())
        for family in families:
            for size in figures.sizes(workload):
                base = figures.get(workload, size, pairs[0], "time a packet")
                cells = [figures.get(workload, size, f"{family} {batch}", "time a packet") for batch in BATCHES]
                if base is None or not any(cells):
                    continue
                shown = " | ".join("" if cell is None else f"{cell:.0f}" for cell in cells)
                lines.append(f"| {workload}: {family} | {size} | {base:.0f} | {shown} |")
    return "\n".join([*(lines if len(lines) > 2 else []), *sweep_costs(figures)])


def sweep_costs(figures: Figures) -> list[str]:
    """Markdown: what else depends on the size of the batch."""
    head = "| packets a batch | idle p50, us | p95 | p99 | delivered under overload | CPU, ns a bit | calls a packet |"
    lines: list[str] = []
    for batch in (1, *BATCHES):
        echo = "one by one" if batch == 1 else f"batch {batch}"
        trips = [figures.get("udp echo, idle", 64, echo, f"round trip p{percent}") for percent in (50, 95, 99)]
        names = ("delivered", "cpu a bit", "calls a packet")
        share, cpu, calls = (figures.get(SWEEP, 64, f"batch {batch}", name) for name in names)
        if None in trips or share is None:
            continue
        shown = " | ".join(f"{trip:.1f}" for trip in trips)
        lines.append(f"| {batch} | {shown} | {share:.1%} | {cpu:.2f} | {calls:.3f} |")
    return ["", head, "|---:|---:|---:|---:|---:|---:|---:|", *lines] if lines else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two sizes, two batches, few rounds; under 50 s")
    parser.add_argument("--sweep", action="store_true", help="print time a packet by the size of the batch")
    parser.add_argument("--rounds", type=int, help="default 41, or 15 with --quick")
    parser.add_argument("--runs", type=int, help="rounds of what takes seconds each: default 3, or 1 with --quick")
    parser.add_argument("--bursts", type=int, help="bursts of 256 packets a sample: default 1")
    parser.add_argument("--pings", type=int, help="pings a round: default 1000")
    parser.add_argument("--seconds", type=float, help="of an overload: default 1.5, or 1 with --quick")
    parser.add_argument("--sizes", type=int, nargs="*", help="bytes of a packet: 64 431 1200 8192, or 64 1200")
    parser.add_argument("--batches", type=int, nargs="*", help="packets a batch: 8 16 32 64 128, or 32 64")
    parser.add_argument("--json", type=Path, help="write rows and ratios here")
    parser.add_argument("--plot", type=Path, help="draw a chart here")
    parser.add_argument("--only", nargs="*", help=f"workloads with one of these words: {', '.join(WORKLOADS)}")
    parser.add_argument("--from", type=Path, dest="source", help="print and draw this JSON file; measure nothing")
    options = parser.parse_args()
    usual, quick = (41, 3, 1, 1000, 1.5, SIZES, BATCHES), (15, 1, 1, 1000, 1.0, (64, 1200), (32, DEFAULT))
    for name, much, little in zip(
        ("rounds", "runs", "bursts", "pings", "seconds", "sizes", "batches"), usual, quick, strict=True
    ):
        if not getattr(options, name):
            setattr(options, name, little if options.quick and not (options.sweep and name == "batches") else much)
    if options.source:
        outcome = json.loads(options.source.read_text(encoding="utf-8"))
    else:
        print(f"load average before: {os.getloadavg()[0]:.2f}" if hasattr(os, "getloadavg") else "", file=sys.stderr)
        outcome = measure(options)
    figures = Figures(outcome["rows"])
    print(table(figures))
    if options.sweep:
        print(f"\n{sweep_table(figures)}")
    print()
    for name, value in outcome["ratios"].items():
        print(f"{value:8.3f}  {name}{verdict(name, value, figures)}")
    for note in outcome["notes"]:
        print(f"note: {note}")
    if options.json:
        options.json.write_text(json.dumps(outcome, indent=1) + "\n", encoding="utf-8")
    if options.plot:
        from osio_chart import chart

        chart(figures, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
