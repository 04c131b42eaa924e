"""The osio benchmark runs, and what it writes has the shape that others read. Nothing here looks at times."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parent.parent / "scripts" / "bench" / "osio.py"
TINY = ["--rounds", "1", "--runs", "1", "--bursts", "1", "--pings", "20", "--seconds", "0.05", "--batches", "32", "64"]
LIMIT = 60.0  # seconds; only a failure takes as long


def run(*arguments: str) -> str:
    command = [sys.executable, str(BENCH), *TINY, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the back ends that it compares are those of Linux")
def test_json_has_rows_ratios_and_notes(tmp_path: Path) -> None:
    target = tmp_path / "osio.json"
    printed = run("--only", "tcp flush", "udp receive", "--sizes", "64", "--json", str(target))
    outcome = json.loads(target.read_text(encoding="utf-8"))
    assert set(outcome) == {"rows", "ratios", "notes"}
    for row in outcome["rows"]:
        assert set(row) == {"workload", "mtu", "pair", "metric", "value", "unit"}
        assert row["mtu"] == "64"
        assert isinstance(row["value"], int | float)
    assert all(row["value"] == 0 for row in outcome["rows"] if row["metric"] == "lost")
    assert {row["workload"] for row in outcome["rows"]} == {"tcp flush", "udp receive"}
    assert outcome["ratios"]["tcp_flush32_vs_single_64"] > 0
    calls = {(r["workload"], r["pair"]): r["value"] for r in outcome["rows"] if r["metric"] == "calls a packet"}
    assert calls["tcp flush", "send each"] == 1.0
    assert calls["tcp flush", "flush 64"] == 1 / 64
    assert "| tcp flush | flush 64 |" in printed


@pytest.mark.slow
def test_a_sweep_is_printed_from_what_was_measured_before(tmp_path: Path) -> None:
    rows = [
        {"workload": "tcp flush", "mtu": "64", "pair": pair, "metric": "time a packet", "value": value, "unit": "ns"}
        for pair, value in (("send each", 1700.0), ("flush 8", 400.0), ("flush 64", 130.0))
    ]
    source = tmp_path / "before.json"
    source.write_text(json.dumps({"rows": rows, "ratios": {"tcp_flush32_vs_single_64": 5.0}, "notes": []}))
    printed = run("--from", str(source), "--sweep")
    assert "| tcp flush: flush | 64 | 1700 | 400 |  |  | 130 |  |" in printed
    assert "tcp_flush32_vs_single_64  aim >= 6: MISSED" in printed
