"""Rows of the osio benchmark: samples in, figures with their names out."""

from __future__ import annotations

import statistics
from typing import Any

from osio_moves import Outcome

Row = dict[str, Any]


def row(workload: str, size: int, pair: str, metric: str, value: float, unit: str) -> Row:
    return {"workload": workload, "mtu": str(size), "pair": pair, "metric": metric, "value": value, "unit": unit}


def move_rows(workload: str, size: int, baseline: str, found: dict[str, Outcome]) -> list[Row]:
    """Medians of every mode; how many times the baseline next to it, as the median of the neighbours."""
    rows: list[Row] = []
    for pair, outcome in found.items():
        each = outcome.median(lambda sample: sample.each)
        lost = sum(sample.lost for sample in outcome.samples)
        rows += [
            row(workload, size, pair, "packets", 1 / each, "1/s"),
            row(workload, size, pair, "time a packet", each * 1e9, "ns"),
            row(workload, size, pair, "cpu a packet", outcome.median(lambda s: s.cpu / s.packets) * 1e9, "ns"),
            row(workload, size, pair, "calls a packet", outcome.median(lambda s: s.calls / s.packets), "calls"),
            row(workload, size, pair, "lost", lost, "packets"),
            row(
                workload,
                size,
                pair,
                "mean time a packet",
                statistics.fmean(s.each for s in outcome.samples) * 1e9,
                "ns",
            ),
            row(workload, size, pair, "worst time a packet", max(s.each for s in outcome.samples) * 1e9, "ns"),
        ]
        if pair != baseline:
            rows.append(row(workload, size, pair, "times one by one", statistics.median(outcome.times), "x"))
    return rows


class Figures:
    """Rows by their names."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows
        self._values = {(r["workload"], r["mtu"], r["pair"], r["metric"]): float(r["value"]) for r in rows}

    def get(self, workload: str, size: int | str, pair: str, metric: str) -> float | None:
        return self._values.get((workload, str(size), pair, metric))

    def pairs(self, workload: str) -> list[str]:
        return list(dict.fromkeys(r["pair"] for r in self.rows if r["workload"] == workload))

    def sizes(self, workload: str) -> list[str]:
        return list(dict.fromkeys(r["mtu"] for r in self.rows if r["workload"] == workload))

    def quotient(self, workload: str, size: int | str, metric: str, over: str, under: str) -> float | None:
        above, below = self.get(workload, size, over, metric), self.get(workload, size, under, metric)
        return above / below if above is not None and below else None
