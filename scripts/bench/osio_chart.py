"""The chart of the osio benchmark: time a packet by batch size, round trips, delivery under overload."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from osio_rows import Figures

BATCHES: Final = (1, 8, 16, 32, 64, 128)
#: panel title -> (workload, baseline, (family, colour) ...)
LINES: Final[dict[str, tuple[str, str, tuple[tuple[str, str], ...]]]] = {
    "UDP send, ns a 64-byte packet": ("udp send", "sendto", (("sendmmsg", "#6fb1dd"), ("gso", "#1b6ca8"))),
    "UDP receive, ns a 64-byte packet": (
        "udp receive",
        "poll + recvfrom",
        (("recvmmsg", "#6fb1dd"), ("gro", "#1b6ca8")),
    ),
    "TUN read, ns a 64-byte packet": ("tun read", "poll + read", (("portable", "#6fb1dd"), ("drain", "#1b6ca8"))),
    "TCP flush, ns a 64-byte frame": ("tcp flush", "send each", (("flush", "#1b6ca8"),)),
}
GREY: Final = "#808080"


def chart(figures: Figures, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 3, figsize=(13, 7.2))
    for axis, (title, (workload, baseline, families)) in zip(axes.flat, LINES.items(), strict=False):
        base = figures.get(workload, 64, baseline, "time a packet")
        for family, colour in families:
            points = [
                (batch, value)
                for batch in BATCHES
                if (value := figures.get(workload, 64, f"{family} {batch}", "time a packet")) is not None
            ]
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", color=colour, label=family)
                axis.annotate(f"{points[-1][1]:.0f}", points[-1], fontsize=8, xytext=(0, 5), textcoords="offset points")
        if base is not None:
            axis.axhline(base, color=GREY, linestyle="--", label=f"{baseline} ({base:.0f})")
        axis.set_xscale("log", base=2)
        axis.set_xticks(BATCHES, [str(batch) for batch in BATCHES])
        axis.set_ylim(bottom=0)
        axis.set_xlabel("packets a batch", fontsize=8)
        finish(axis, title)
    echoes(axes.flat[4], figures)
    delivery(axes.flat[5], figures)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def finish(axis: Any, title: str) -> None:
    axis.set_title(title, fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=8)
    handles, _ = axis.get_legend_handles_labels()
    if handles:
        axis.legend(fontsize=8, frameon=False)


def echoes(axis: Any, figures: Figures) -> None:
    """p50 and p99, idle and loaded."""
    kinds = (("udp echo, idle", "UDP idle"), ("udp echo, loaded", "UDP loaded"), ("tun echo, idle", "TUN idle"))
    names = [f"{shown} p{percent}".replace(" ", "\n") for _, shown in kinds for percent in (50, 99)]
    for offset, pair, colour in ((-0.2, "one by one", GREY), (0.2, "batch 64", "#1b6ca8")):
        values = [
            figures.get(workload, 64, pair, f"round trip p{percent}") or 0.0
            for workload, _ in kinds
            for percent in (50, 99)
        ]
        drawn = axis.bar([x + offset for x in range(len(names))], values, 0.4, color=colour, label=pair)
        axis.bar_label(drawn, fmt="%.0f", fontsize=7)
    axis.set_xticks(range(len(names)), names)
    axis.set_yscale("log")
    axis.set_yticks((10, 30, 100, 300, 1000), ("10", "30", "100", "300", "1000"))
    axis.minorticks_off()
    axis.set_ylim(8, 2000)
    finish(axis, "echo round trips, us (less is better)")


def delivery(axis: Any, figures: Figures) -> None:
    kinds = (("udp overload, raw", "back end"), ("udp overload, nodes", "two nodes"))
    for offset, pair, colour in ((-0.2, "one by one", GREY), (0.2, "default batch", "#1b6ca8")):
        values = [100 * (figures.get(workload, 64, pair, "delivered") or 0.0) for workload, _ in kinds]
        drawn = axis.bar([x + offset for x in range(len(kinds))], values, 0.4, color=colour, label=pair)
        axis.bar_label(drawn, fmt="%.0f %%", fontsize=8)
    axis.set_xticks(range(len(kinds)), [shown for _, shown in kinds])
    axis.set_ylim(0, 130)
    finish(axis, "64-byte packets delivered, 2.5 times the limit")
