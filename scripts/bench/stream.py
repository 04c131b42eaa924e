#!/usr/bin/env python3
"""Streams and calls over links: rnsfast beside the reference, two processes on loopback, in one interleaved run.

    stream.py [--quick] [--runs N] [--json FILE] [--png FILE] [--interface tcp|backbone] [--only WORD ...]

Pairs are client>server: `ours>ours`, `ours>rns`, `rns>ours`, `rns>rns`. The reference is used as kindly as it allows
(no compression attempts, readiness looked at every 0.5 ms); `rns>rns default` is one row with what a
program gets that knows nothing of that. Data is incompressible. Every figure is the median of the runs; the machine's
noise hits all pairs alike, because they take turns.

Workloads: one stream of 1 MiB and of 10 MiB; ten streams of 1 MiB on ten links at once; a 512-byte request answered by
2048 bytes over channel messages, one at a time. Each at link MTU 500 and at the MTU the link discovers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))

from interop.harness import CLIENTS, SERVERS, free_port, stock_python, write_config  # noqa: E402

MIB = 1 << 20
PAIRS = ("ours>ours", "ours>rns", "rns>ours", "rns>rns")
DEFAULTS = "rns>rns default"
LIMIT = 90.0  # seconds for one measurement
#: name -> (workload of the endpoints, their options)
WORKLOADS: dict[str, tuple[str, list[str]]] = {
    "stream 1 MiB": ("stream", ["--bytes", str(MIB)]),
    "stream 10 MiB": ("stream", ["--bytes", str(10 * MIB)]),
    "ten x 1 MiB": ("ten", ["--bytes", str(MIB)]),
    "call 512/2048": ("rpc", ["--calls", "500"]),
}
QUICK: dict[str, tuple[str, list[str]]] = {
    "stream 1 MiB": ("stream", ["--bytes", str(MIB)]),
    "ten x 0.1 MiB": ("ten", ["--bytes", str(MIB // 10)]),
    "call 512/2048": ("rpc", ["--calls", "150"]),
}
#: metric -> (key in an endpoint's result, unit)
METRICS = {
    "throughput": ("mb_per_s", "MB/s"),
    "round trip p50": ("median_us", "us"),
    "round trip p99": ("p99_us", "us"),
    "client cpu": ("cpu", "s"),
    "server cpu": ("server_cpu", "s"),
    "client peak rss": ("rss", "bytes"),
    "server peak rss": ("server_rss", "bytes"),
}


def program(side: str) -> list[str]:
    """The endpoint of one side; the reference runs wherever `rns` is installed."""
    python = stock_python() if side == "rns" else sys.executable
    return [python, str(HERE / f"{side}_side.py")]


@contextlib.contextmanager
def serving(side: str, config: Path, writer: list[str]) -> Iterator[str]:
    """A server process; yields its destination hash. Ends it by its own handle."""
    command = [*program(side), "server", "--config", str(config), *writer]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    late = threading.Timer(2 * LIMIT, process.kill)
    late.start()
    try:
        assert process.stdin is not None and process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"the {side} server did not start")
        yield json.loads(line)["dest"]
        process.stdin.write("quit\n")
        process.stdin.flush()
        process.wait(20)
    finally:
        late.cancel()
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def measure(pair: str, mtu: int, workload: str, options: list[str], interface: str) -> dict[str, Any]:
    """One measurement: two new processes, one result."""
    client, server = pair.split()[0].split(">")
    writer = ["--writer", "default" if "default" in pair else "kind"]
    with tempfile.TemporaryDirectory(prefix="rnsfast-bench-") as directory:
        port = free_port()
        listening = write_config(Path(directory) / "server", [SERVERS[interface](port)])
        connecting = write_config(Path(directory) / "client", [CLIENTS[interface](port)], link_mtu_discovery=mtu != 500)
        with serving(server, listening, writer) as destination:
            command = [*program(client), "client", "--config", str(connecting), "--dest", destination]
            command += ["--workload", workload, "--limit", str(LIMIT), *options, *writer]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=2 * LIMIT, check=False)
    lines = done.stdout.strip().splitlines()
    result: dict[str, Any] = json.loads(lines[-1]) if lines else {"ok": False, "reason": "the client said nothing"}
    return result


def run(options: argparse.Namespace) -> dict[tuple[str, str, str], list[dict[str, Any]]]:
    """All measurements, interleaved: (workload, mtu name, pair) -> results."""
    workloads = QUICK if options.quick else WORKLOADS
    results: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for number in range(options.runs):
        for name, (workload, arguments) in workloads.items():
            if options.only and not any(word in name for word in options.only):
                continue
            for mtu in (500, 0):
                pairs = list(PAIRS)
                if name == "stream 1 MiB" and not options.quick:
                    pairs.append(DEFAULTS)
                for pair in pairs:
                    result = measure(pair, mtu, workload, arguments, options.interface)
                    if not result["ok"]:
                        print(f"  {name} {pair} failed: {result.get('reason')}", file=sys.stderr)
                    key = (name, "500" if mtu else "discovered", pair)
                    results.setdefault(key, []).append(result)
        print(f"run {number + 1} of {options.runs} done", file=sys.stderr, flush=True)
    return results


def summary(results: dict[tuple[str, str, str], list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians as rows, and what they say as ratios."""
    rows: list[dict[str, Any]] = []
    median: dict[tuple[str, str, str, str], float] = {}
    for (workload, mtu, pair), runs in results.items():
        good = [run for run in runs if run["ok"]]
        rows.append(row(workload, mtu, pair, "failed runs", len(runs) - len(good), "runs"))
        for metric, (key, unit) in METRICS.items():
            values = [run[key] for run in good if key in run]
            if values:
                median[workload, mtu, pair, metric] = statistics.median(values)
                rows.append(row(workload, mtu, pair, metric, statistics.median(values), unit))
        sizes = [run["bytes"] for run in good if "bytes" in run]
        for side in ("client", "server"):
            spent = median.get((workload, mtu, pair, f"{side} cpu"))
            if spent is not None and sizes:
                rows.append(row(workload, mtu, pair, f"{side} cpu per MiB", spent / (sizes[0] / MIB), "s"))
    ratios: dict[str, float] = {}
    for workload, mtu, pair in results:
        if pair == "rns>rns":
            continue
        for metric, better in (("throughput", 1), ("round trip p50", -1), ("round trip p99", -1)):
            ours, base = median.get((workload, mtu, pair, metric)), median.get((workload, mtu, "rns>rns", metric))
            if ours and base:
                ratios[f"{workload}, mtu {mtu}, {metric}, {pair} : rns>rns"] = (ours / base) ** better
    for workload, mtu, pair in results:
        if workload.startswith("ten") and pair == "ours>ours":
            many = median.get((workload, mtu, pair, "throughput"))
            one = median.get(("stream 1 MiB", mtu, pair, "throughput"))
            if many and one:
                ratios[f"ten streams : one stream, mtu {mtu}, throughput, ours>ours"] = many / one
    return {"rows": rows, "ratios": ratios}


def row(workload: str, mtu: str, pair: str, metric: str, value: float, unit: str) -> dict[str, Any]:
    return {"workload": workload, "mtu": mtu, "pair": pair, "metric": metric, "value": value, "unit": unit}


def table(outcome: dict[str, Any]) -> str:
    """The figures as a Markdown table: throughput in MB/s, round trips in microseconds, times the reference."""
    value = {(r["workload"], r["mtu"], r["pair"], r["metric"]): r["value"] for r in outcome["rows"]}
    workloads = dict.fromkeys((r["workload"], r["mtu"]) for r in outcome["rows"])
    columns = [pair for pair in (*PAIRS, DEFAULTS) if any(r["pair"] == pair for r in outcome["rows"])]
    lines = ["| workload | MTU | metric | " + " | ".join(columns) + " |", "|---|---|---|" + "---:|" * len(columns)]
    for workload, mtu in workloads:
        for metric in ("throughput", "round trip p50", "round trip p99"):
            base = value.get((workload, mtu, "rns>rns", metric))
            cells = []
            for pair in columns:
                found = value.get((workload, mtu, pair, metric))
                if found is None:
                    cells.append("")
                    continue
                times = "" if not base or pair == "rns>rns" else f" ({ratio(found, base, metric):.1f}x)"
                cells.append(f"{found:.1f} MB/s{times}" if metric == "throughput" else f"{found:.0f} us{times}")
            if any(cells):
                lines.append(f"| {workload} | {mtu} | {metric} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def ratio(found: float, base: float, metric: str) -> float:
    return found / base if metric == "throughput" else base / found


def chart(outcome: dict[str, Any], path: Path) -> None:
    """Bars: ours and the reference for each workload, throughput and round trip side by side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    value = {(r["workload"], r["mtu"], r["pair"], r["metric"]): r["value"] for r in outcome["rows"]}
    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4.6), gridspec_kw={"width_ratios": (3, 3, 2)})
    colours = {"ours>ours": "#1b6ca8", "ours>rns": "#6fb1dd", "rns>ours": "#b8d8ee", "rns>rns": "#b0b0b0"}
    panels = (("500", "throughput", "MB/s, link MTU 500"), ("discovered", "throughput", "MB/s, discovered MTU"))
    for axis, (mtu, metric, title) in zip(axes[:2], panels, strict=True):
        names = [
            w for w in dict.fromkeys(r["workload"] for r in outcome["rows"]) if (w, mtu, "rns>rns", metric) in value
        ]
        bars(axis, names, [[value.get((w, mtu, pair, metric), 0.0) for w in names] for pair in PAIRS], colours, title)
    calls = [w for w in dict.fromkeys(r["workload"] for r in outcome["rows"]) if w.startswith("call")]
    if calls:
        names = ["500", "discovered"]
        heights = [[value.get((calls[0], mtu, pair, "round trip p50"), 0.0) for mtu in names] for pair in PAIRS]
        bars(axes[2], names, heights, colours, "us per 512/2048 call, median (less is better)")
    axes[0].legend(fontsize=8, frameon=False, title="client>server", title_fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def bars(axis: Any, names: list[str], heights: list[list[float]], colours: dict[str, str], title: str) -> None:
    width = 0.2
    for i, (pair, values) in enumerate(zip(PAIRS, heights, strict=True)):
        drawn = axis.bar(
            [x + (i - 1.5) * width for x in range(len(names))], values, width, color=colours[pair], label=pair
        )
        axis.bar_label(drawn, fmt=lambda v: f"{v:.0f}" if v >= 10 else f"{v:.1f}", fontsize=7, padding=1)
    axis.set_xticks(range(len(names)), names, fontsize=8)
    axis.set_title(title, fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one run of smaller workloads, under 50 s")
    parser.add_argument("--runs", type=int, help="default 5, or 1 with --quick")
    parser.add_argument("--json", type=Path, help="write rows and ratios here")
    parser.add_argument("--png", type=Path, help="draw a chart here")
    parser.add_argument("--interface", choices=("tcp", "backbone"), default="tcp")
    parser.add_argument("--only", nargs="*", help="workloads with one of these words in their name")
    options = parser.parse_args()
    options.runs = options.runs or (1 if options.quick else 5)
    results = run(options)
    outcome = summary(results)
    print(table(outcome))
    print()
    for name, times in outcome["ratios"].items():
        print(f"{times:6.2f}x  {name}")
    if options.json:
        options.json.write_text(json.dumps(outcome, indent=1) + "\n", encoding="utf-8")
    if options.png:
        chart(outcome, options.png)
    return 0 if all(result["ok"] for runs in results.values() for result in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
