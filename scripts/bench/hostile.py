#!/usr/bin/env python3
"""What hostile peers do to the others: a transport node under floods at full speed, one kind after the other.

    hostile.py [--quick] [--seconds N] [--json FILE] [--only WORD ...]

A node process with a listening interface and the default limits. A link runs through it between two connections of the
driver; a third connection floods for some seconds. Reported: the latency of the link, one frame at a time, before and
meanwhile; hostile packets a second that the node took; CPU and memory of the node.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent)]

from relay import Bridge, End, Relay, _drain, _quantile, announce  # noqa: E402

from rnsfast.crypto.identity import Identity  # noqa: E402
from rnsfast.wire.handshake import MODE_AES256_CBC, LinkRequest, build_link_request  # noqa: E402
from rnsfast.wire.hdlc import encode_many  # noqa: E402
from rnsfast.wire.packet import CTX_NONE, DATA, LINK, LINKREQUEST, PLAIN, SINGLE, make_raw  # noqa: E402
from rnsfast.wire.pathrequest import PATH_REQUEST_DESTINATION, PathRequest, build_path_request  # noqa: E402
from rnsfast.wire.proof import proof_packet  # noqa: E402
from rnsfast.wire.tunnel import TUNNEL_DESTINATION, Synthesis, build_synthesis, synthesis_signed_data  # noqa: E402

BATCH = 500  # packets a write
Make = Callable[[Bridge, Identity], bytes]


def _announce(made: Bridge, owner: Identity) -> bytes:
    return announce(owner, os.urandom(4).hex(), time.time())[1]


def _forged(made: Bridge, owner: Identity) -> bytes:
    raw = _announce(made, owner)
    return raw[:103] + os.urandom(63) + b"\x05"  # 19 of header, 84 before the signature


def _request(destination: bytes) -> bytes:
    data = build_path_request(PathRequest(destination, None, os.urandom(16)))
    return make_raw(PLAIN << 2 | DATA, PATH_REQUEST_DESTINATION, CTX_NONE, data)


def _via(made: Bridge, raw: bytes) -> bytes:
    return bytes((0x50 | raw[0], 0)) + made.relay.identity.hash + raw[2:]


def _link(made: Bridge, owner: Identity) -> bytes:
    body = build_link_request(LinkRequest(os.urandom(32), os.urandom(32), None, MODE_AES256_CBC))
    return _via(made, make_raw(LINKREQUEST, made.destination, CTX_NONE, body))


def _tunnel(made: Bridge, owner: Identity) -> bytes:
    port, salt = os.urandom(32), os.urandom(16)
    signature = owner.sign(synthesis_signed_data(owner.public_key, port, salt))
    body = build_synthesis(Synthesis(owner.public_key, port, salt, signature))
    return make_raw(PLAIN << 2 | DATA, TUNNEL_DESTINATION, CTX_NONE, body)


FLOODS: dict[str, Make] = {
    "announces": _announce,
    "forged announces": _forged,
    "path requests, random": lambda made, owner: _request(os.urandom(16)),
    "path requests, known": lambda made, owner: _request(made.destination),
    "link requests": _link,
    "unknown links": lambda made, owner: make_raw(LINK << 2 | DATA, os.urandom(16), CTX_NONE, bytes(40)),
    "packets without path": lambda made, owner: _via(
        made, make_raw(SINGLE << 2 | DATA, os.urandom(16), CTX_NONE, os.urandom(40))
    ),
    "tunnels": _tunnel,
    "forged proofs": lambda made, owner: proof_packet(os.urandom(32), bytes(64), explicit=False),
    "noise": lambda made, owner: os.urandom(60),
}


def flood(made: Bridge, kind: str, seconds: float) -> dict[str, tuple[float, str]]:
    """One kind, for `seconds`. Packets are made before, as many as a fast node takes, and repeated after that."""
    owner = Identity()
    count = int(30_000 * max(1.0, seconds)) if "announce" not in kind and kind != "tunnels" else 12_000
    packets = [FLOODS[kind](made, owner) for _ in range(count)]
    blocks = [encode_many(packets[at : at + BATCH]) for at in range(0, count, BATCH)]
    quiet = made.latency(400, 0.002)
    enemy, stop, over = End(made.relay.port), threading.Event(), threading.Event()
    drains = [threading.Thread(target=_drain, args=(sock, over)) for sock in (enemy.sock, made.near.sock)]
    sent = [0]

    def pour() -> None:
        enemy_out = enemy.sock.dup()
        enemy_out.settimeout(30.0)
        with enemy_out:
            while not stop.is_set():
                enemy_out.sendall(blocks[sent[0] % len(blocks)])
                sent[0] += 1

    for drain in drains:
        drain.start()
    cpu, rss, began = made.relay.cpu(), made.relay.rss(), time.perf_counter()
    pourer = threading.Thread(target=pour)
    pourer.start()
    threading.Timer(seconds, stop.set).start()
    busy = made.latency(1 << 30, 0.002, stop)
    pourer.join()
    took = time.perf_counter() - began
    used, grown = made.relay.cpu() - cpu, made.relay.rss() - rss
    over.set()
    for drain in drains:
        drain.join()
    enemy.close()
    return {
        "packets": (sent[0] * BATCH / took, "1/s"),
        "cpu a packet": (used / max(1, sent[0] * BATCH) * 1e6, "us"),
        "quiet p50": (_quantile(quiet, 0.5), "us"),
        "quiet p99": (_quantile(quiet, 0.99), "us"),
        "flood p50": (_quantile(busy, 0.5), "us"),
        "flood p99": (_quantile(busy, 0.99), "us"),
        "flood worst": (max(busy, default=float("nan")) * 1e6, "us"),
        "rss before": (float(rss), "bytes"),
        "rss grown": (float(grown), "bytes"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a second a flood, under 50 s in all")
    parser.add_argument("--seconds", type=float, help="of each flood; default 8, or 1 with --quick")
    parser.add_argument("--json", type=Path, help="write rows and ratios here")
    parser.add_argument("--only", nargs="*", help="floods with one of these words in their name")
    options = parser.parse_args()
    seconds = options.seconds or (1.0 if options.quick else 8.0)
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    print("| flood | packets 1/s | CPU us | p50, p99 quiet | p50, p99 flooded | worst | memory grown |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for kind in FLOODS:
        if options.only and not any(word in kind for word in options.only):
            continue
        with tempfile.TemporaryDirectory(prefix="rnsfast-bench-") as directory:
            relay = Relay("ours", "tcp", Path(directory), ingress_control=True, announce_cap=2)
            try:
                made = Bridge(relay)
                found = flood(made, kind, seconds)
                made.close()
            finally:
                relay.stop()
        value = {metric: figure for metric, (figure, _) in found.items()}
        rows += [
            {"workload": kind, "mtu": "16384", "pair": "ours", "metric": metric, "value": figure, "unit": unit}
            for metric, (figure, unit) in found.items()
        ]
        for share in ("p50", "p99"):
            ratios[f"hostile, {kind}, link latency flooded : quiet, {share}"] = (
                value[f"flood {share}"] / value[f"quiet {share}"]
            )
        latencies = [f"{value[f'{when} p50']:.0f}, {value[f'{when} p99']:.0f}" for when in ("quiet", "flood")]
        print(
            f"| {kind} | {value['packets']:,.0f} | {value['cpu a packet']:.1f} | {' | '.join(latencies)} "
            f"| {value['flood worst'] / 1000:.0f} ms | {value['rss grown'] / 1e6:.0f} MB |",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "ratios": ratios}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
