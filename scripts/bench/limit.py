#!/usr/bin/env python3
"""How far the engine is from the limit that cryptography sets: microseconds a message, without any socket.

    limit.py [--quick] [--json FILE]

Two engines joined by lists stream data over a channel; each end's time a message is compared with what the primitives
alone take for the same message: the sender seals it (AES-256-CBC, HMAC), hashes its packet and verifies its proof, the
receiver authenticates and opens it, hashes its packet and signs the proof. The reference must do the same work.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from rnsfast.crypto.ed25519 import SigningKey, VerifyKey
from rnsfast.crypto.hashes import full
from rnsfast.crypto.token import TokenKey
from rnsfast.engine.streams import SendStream
from tests.virtualnet import VirtualNet

BATCH = 16  # packets handed over at a time, as the reactor does


def stream(size: int, *, large: bool) -> tuple[float, float, int]:
    """Microseconds a message at the sender and at the receiver, and bytes of a message."""
    net = VirtualNet(3)
    link, peer, there, back = net.linked(delay=0.001, upgradable=large)
    channel, reader = link.open_channel(net.now), peer.open_channel(net.now).open_reader(1)
    sending = SendStream(1, limit=size + 1)
    sending.put(os.urandom(size))
    sending.close()
    spent = [0.0, 0.0]
    messages = 0

    def timed(end: int, work: Callable[..., Any], *arguments: Any) -> None:
        began = perf_counter()
        work(*arguments)
        spent[end] += perf_counter() - began

    timed(0, channel.feed, sending, net.now)
    while not reader.eof:
        packets = there.source.take()
        messages += len(packets)
        for at in range(0, len(packets), BATCH):
            timed(1, peer.engine.receive, there.sink, packets[at : at + BATCH], net.now)
        proofs = back.source.take()
        for at in range(0, len(proofs), BATCH):
            timed(0, link.engine.receive, back.sink, proofs[at : at + BATCH], net.now)
        reader.take()
        for node in net.nodes:
            node.engine.touched.clear()
            node.engine.dirty.clear()
    return spent[0] / messages * 1e6, spent[1] / messages * 1e6, channel.stream_mdu


def primitives(size: int, rounds: int) -> dict[str, float]:
    """Microseconds of each primitive for one message of `size` bytes, in batches of 16."""
    key, signing = TokenKey(os.urandom(64)), SigningKey(os.urandom(32))
    verifying = VerifyKey(signing.public)
    plain = [os.urandom(size + 8) for _ in range(BATCH)]
    tokens = key.seal_many(plain)
    hashes = [full(token) for token in tokens]
    proofs = list(zip(signing.sign_many(hashes), hashes, strict=True))

    def each(work: Callable[[], Any]) -> float:
        took = []
        for _ in range(rounds):
            began = perf_counter()
            work()
            took.append(perf_counter() - began)
        return statistics.median(took) / BATCH * 1e6

    return {
        "seal": each(lambda: key.seal_many(plain)),
        "open": each(lambda: key.open_many(tokens)),
        "hash": each(lambda: [full(token) for token in tokens]),
        "sign": each(lambda: signing.sign_many(hashes)),
        "verify": each(lambda: verifying.verify_many(proofs)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", type=Path, help="write rows and ratios here")
    options = parser.parse_args()
    runs, rounds = (3, 50) if options.quick else (7, 300)
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    print("| MTU | end | engine, us a message | primitives, us | of them | share | MB/s on one core |")
    print("|---|---|---:|---:|---|---:|---:|")
    for mtu, large, size in (("500", False, 1_000_000), ("16384", True, 16_000_000)):
        measured = [stream(size, large=large) for _ in range(runs)]
        chunk = measured[0][2]
        cost = primitives(chunk, rounds)
        for end, index, parts in (("sender", 0, ("verify", "seal", "hash")), ("receiver", 1, ("sign", "open", "hash"))):
            whole = statistics.median(run[index] for run in measured)
            limit = sum(cost[part] for part in parts)
            shown = ", ".join(f"{part} {cost[part]:.1f}" for part in parts)
            share, rate = limit / whole, chunk / whole
            print(f"| {mtu} | {end} | {whole:.1f} | {limit:.1f} | {shown} | {share:.0%} | {rate:.1f} |")
            for metric, value, unit in (("engine", whole, "us"), ("primitives", limit, "us"), ("rate", rate, "MB/s")):
                rows.append(
                    {"workload": "stream", "mtu": mtu, "pair": end, "metric": metric, "value": value, "unit": unit}
                )
            ratios[f"{end}, mtu {mtu}, primitives : engine"] = share
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "ratios": ratios}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
