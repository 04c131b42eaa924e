"""The demonstration behind scripts/demo: our commands on one side, a program on the stock `rns` API on the other."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from interop.harness import free_port, tcp_client, tcp_server, write_config  # noqa: E402

SIZE = 20_000_000  # bytes, without a file of the user's
LIMIT = 300.0  # seconds for everything
STOCK = [sys.executable, str(ROOT / "interop" / "file_peer.py")]
OURS = [sys.executable, "-m", "rnsfast.cli"]


class Failed(Exception):
    """One sentence for the user."""


def say(text: str) -> None:
    print(text, flush=True)


def digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def start(command: list[str], processes: list[subprocess.Popen[str]], **options: object) -> subprocess.Popen[str]:
    process = subprocess.Popen(command, text=True, cwd=ROOT, **options)  # type: ignore[call-overload]
    processes.append(process)
    return process


def address_of(process: subprocess.Popen[str], who: str) -> str:
    """The first line a receiver prints."""
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if len(line) != 32:
        raise Failed(f"the {who} did not start")
    return line


def finish(process: subprocess.Popen[str], who: str) -> str:
    """What it printed after its address; Failed unless it ended well."""
    output = process.communicate()[0] or ""
    if process.returncode != 0:
        raise Failed(f"{who} ended with exit status {process.returncode}: {output.strip() or 'see above'}")
    return output


def run(directory: Path, source: Path, processes: list[subprocess.Popen[str]]) -> None:
    port = free_port()
    stock = write_config(directory / "stock", [tcp_server(port)])
    ours = write_config(directory / "ours", [tcp_client(port)])
    there, back = directory / "there", directory / "back"
    there.mkdir()
    back.mkdir()
    size, expected = source.stat().st_size, digest_of(source)
    say(f"file      {source.name}, {size:,} bytes, sha256 {expected}")

    say("\n1. rnsfast send  ->  stock rns peer")
    receiver = start(
        [*STOCK, "receive", "--config", str(stock), "--dir", str(there), "--once", "--print-hash"],
        processes, stdout=subprocess.PIPE,
    )  # fmt: skip
    address = address_of(receiver, "stock receiver")
    began = time.monotonic()
    sender = start([*OURS, "send", str(source), address, "--config", str(ours)], processes)
    finish(sender, "rnsfast send")
    seconds_there = time.monotonic() - began
    report = json.loads(finish(receiver, "the stock receiver").strip().splitlines()[-1])

    say("\n2. stock rns peer  ->  rnsfast receive")
    port = free_port()
    ours = write_config(directory / "ours2", [tcp_server(port)])
    stock = write_config(directory / "stock2", [tcp_client(port)])
    receiver = start(
        [*OURS, "receive", "--config", str(ours), "--dir", str(back), "--once"], processes, stdout=subprocess.PIPE
    )
    address = address_of(receiver, "rnsfast receiver")
    began = time.monotonic()
    copy = there / report["saved_as"]
    sender = start([*STOCK, "send", "--config", str(stock), str(copy), address], processes, stdout=subprocess.DEVNULL)
    say(finish(receiver, "rnsfast receive").strip())
    finish(sender, "the stock sender")
    seconds_back = time.monotonic() - began

    (returned,) = back.iterdir()
    digests = {"original": expected, "at the stock peer": digest_of(copy), "came back": digest_of(returned)}
    say("")
    for name, digest in digests.items():
        say(f"sha256    {digest}  {name}")
    if len(set(digests.values())) != 1:
        raise Failed("the digests differ")
    say(f"equal. With start-up and path: there in {seconds_there:.1f} s, back in {seconds_back:.1f} s")
    say("Try it between two machines: rnsfast receive on the one, rnsfast send FILE ADDRESS on the other.")


def end(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()


def leave(number: int, frame: object) -> None:
    """A signal: processes and files are cleared away on the way out."""
    raise SystemExit(128 + number)


def main() -> int:
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)
    processes: list[subprocess.Popen[str]] = []
    late = threading.Timer(LIMIT, lambda: [process.kill() for process in processes])
    late.daemon = True
    late.start()
    try:
        with tempfile.TemporaryDirectory(prefix="rnsfast-demo-", ignore_cleanup_errors=True) as name:
            directory = Path(name)
            source = directory / "random.bin"
            if len(sys.argv) > 1:
                source = Path(sys.argv[1]).resolve()
                if not source.is_file() or not os.access(source, os.R_OK):
                    raise Failed(f"{sys.argv[1]} is no file that can be read")
            else:
                source.write_bytes(os.urandom(SIZE))
            try:
                run(directory, source, processes)
            finally:
                end(processes)
        return 0
    except (Failed, OSError) as error:
        print(f"scripts/demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("scripts/demo: interrupted", file=sys.stderr)
        return 130
    finally:
        late.cancel()


if __name__ == "__main__":
    sys.exit(main())
