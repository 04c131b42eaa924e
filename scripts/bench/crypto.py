"""Cost of signatures, key agreement and tokens, by library: alone, and beside a thread that computes in Python.

    crypto.py [--quick] [--json FILE]

Libraries: `sodium` is libsodium through ctypes.PyDLL (calls keep the GIL), `pynacl` is libsodium through PyNaCl's
bindings (calls release it), `openssl` is OpenSSL through `cryptography`. Tokens: `rnsfast` is `TokenKey`, which seals
and opens a batch under one key without releasing the GIL; `plain` makes a cipher and calls `hmac.digest` for each
message. Figures are microseconds of real time a message: the best of some runs alone, and the mean beside the busy
thread, where anything near twice the first is a fair share of the GIL and the rest is waiting for it.

JSON: {"rows": [{"workload", "mtu", "pair", "metric", "value", "unit"}, ...], "ratios": {...}}; `mtu` is the bytes of a
message, `pair` the library and the batch, `metric` "alone" or "busy".
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from hmac import compare_digest, digest
from typing import Any

from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CBC

from rnsfast.crypto.provider import PROVIDERS, Provider
from rnsfast.crypto.token import TokenKey

BATCHES = (1, 16, 64)
SIZES = (423, 16384)  # bytes of a message: a stream chunk at a link MTU of 500, and the largest chunk
KEY = bytes(range(64))


class Busy:
    """A second thread in a pure Python loop, for the time of a `with` block."""

    def __enter__(self) -> None:
        self._stop = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._thread.join()

    def _run(self) -> None:
        x = 0
        while not self._stop:
            for i in range(1000):
                x = (x * 31 + i) & 0xFFFF


def mean(function: Callable[[], Any], seconds: float) -> float:
    """Seconds a call, over at least `seconds` of calling."""
    calls, start = 0, time.perf_counter()
    while True:
        function()
        calls += 1
        spent = time.perf_counter() - start
        if spent >= seconds:
            return spent / calls


def plain_seal(messages: Sequence[bytes]) -> list[bytes]:
    """Tokens one by one, the obvious way."""
    tokens = []
    for message in messages:
        iv, pad = os.urandom(16), 16 - len(message) % 16
        sealed = iv + Cipher(AES(KEY[32:]), CBC(iv)).encryptor().update(message + bytes((pad,)) * pad)
        tokens.append(sealed + digest(KEY[:32], sealed, "sha256"))
    return tokens


def plain_open(tokens: Sequence[bytes]) -> list[bytes]:
    """The plaintexts of tokens one by one, the obvious way."""
    messages = []
    for token in tokens:
        if not compare_digest(digest(KEY[:32], token[:-32], "sha256"), token[-32:]):
            raise AssertionError("a token we made ourselves does not verify")
        plain = Cipher(AES(KEY[32:]), CBC(token[:16])).decryptor().update(token[16:-32])
        messages.append(plain[: -plain[-1]])
    return messages


def key_workloads(library: Provider) -> dict[str, Callable[[], Any]]:
    """What is done with asymmetric keys, once for each message or link. 32 bytes signed: a packet hash."""
    seed, message = KEY[:32], KEY[32:]
    sign, verify = library.signer(seed), library.verifier(library.ed25519_public(seed))
    exchange, peer, signature = library.exchanger(seed), library.x25519_public(message), sign(message)
    return {
        "sign": lambda: sign(message),
        "verify": lambda: verify(signature, message),
        "exchange": lambda: exchange(peer),
        "new x25519 key": lambda: library.x25519_public(seed),
        "32 random bytes": lambda: library.random(32),
    }


def workloads() -> list[tuple[str, int, str, int, Callable[[], Any]]]:
    """(workload, bytes of a message, pair, messages a call, function)."""
    found: list[tuple[str, int, str, int, Callable[[], Any]]] = []
    for name, make in PROVIDERS.items():
        found += [(work, 32, name, 1, function) for work, function in key_workloads(make()).items()]
    key = TokenKey(KEY)
    for size in SIZES:
        for batch in BATCHES:
            messages = [os.urandom(size) for _ in range(batch)]
            tokens = key.seal_many(messages)
            for pair, seal, open_ in (
                ("rnsfast", key.seal_many, key.open_many),
                ("plain", plain_seal, plain_open),
            ):
                label = f"{pair} x{batch}"
                found.append(("seal", size, label, batch, lambda seal=seal, messages=messages: seal(messages)))
                found.append(("open", size, label, batch, lambda open_=open_, tokens=tokens: open_(tokens)))
    return found


def measure(quick: bool) -> list[dict[str, Any]]:
    """All rows. A full run takes about a minute and a half, a quick one 15 s."""
    alone_runs, alone_time, busy_time = (2, 0.03, 0.15) if quick else (5, 0.08, 1.0)
    rows: list[dict[str, Any]] = []
    for workload, size, pair, batch, function in workloads():
        function()
        alone = min(mean(function, alone_time) for _ in range(alone_runs)) / batch
        with Busy():
            busy = mean(function, busy_time) / batch
        for metric, value in (("alone", alone), ("busy", busy)):
            rows.append(
                {
                    "workload": workload,
                    "mtu": size,
                    "pair": pair,
                    "metric": metric,
                    "value": round(value * 1e6, 2),
                    "unit": "us/message",
                }
            )
    return rows


def ratios(rows: list[dict[str, Any]]) -> dict[str, float]:
    """How many times as long the others take as what the product uses."""
    values = {(r["workload"], r["mtu"], r["pair"], r["metric"]): r["value"] for r in rows}
    found = {}
    for (workload, size, pair, metric), value in values.items():
        ours = pair if pair.startswith("rnsfast") else "rnsfast" + pair[5:] if pair.startswith("plain") else "sodium"
        if pair != ours:
            found[f"{workload} {size} {pair}/{ours} {metric}"] = round(value / values[workload, size, ours, metric], 2)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="short runs: noisy, about 15 s")
    parser.add_argument("--json", metavar="FILE", help="write rows and ratios there")
    options = parser.parse_args()
    rows = measure(options.quick)
    print(f"{'workload':<16}{'bytes':>6}  {'library':<14}{'alone us':>10}{'busy us':>12}")
    for alone, busy in zip(rows[::2], rows[1::2], strict=True):
        head = f"{alone['workload']:<16}{alone['mtu']:>6}  {alone['pair']:<14}"
        print(f"{head}{alone['value']:>10.2f}{busy['value']:>12.2f}")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"rows": rows, "ratios": ratios(rows)}, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
