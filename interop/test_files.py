"""Our file commands with a stock peer that speaks the same protocol, in both directions."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from interop.harness import Workspace, free_port, stock_python, tcp_client, tcp_server, write_config
from interop.proxy import FrameProxy
from interop.seeded import data
from rnsfast import Identity
from rnsfast.cli.exits import Exit
from tests.cli.support import Running, no_control_characters, run, running, wait_for_part

FILE_PEER = str(Path(__file__).resolve().parent / "file_peer.py")
MEGABYTE = 1_000_000
TEXT = b"one line of text that is repeated until the file is full\n"


class Stock(Running):
    """The stock peer."""

    COMMAND = (stock_python() if "pytest" in sys.modules else sys.executable, FILE_PEER)

    def result(self) -> dict[str, Any]:
        """What it says about its transfer."""
        found: dict[str, Any] = json.loads(self.line('"role"'))
        return found


@contextmanager
def stock(*arguments: str, **options: Any) -> Iterator[Stock]:
    made = Stock(*arguments, **options)
    try:
        yield made
    finally:
        made.end()


class Place:
    """Configurations for both sides, joined by TCP; `proxy` stands in between if there is one."""

    def __init__(self, space: Workspace, proxied: bool = False, **ours: Any) -> None:
        port = free_port()
        self.proxy = FrameProxy(port) if proxied else None
        self.inbox = space.directory("inbox")
        self.files = space.directory("files")
        self.listening = port
        self._space, self._ours = space, ours

    @contextmanager
    def _door(self) -> Iterator[int]:
        if self.proxy is None:
            yield self.listening
        else:
            with self.proxy:
                yield self.proxy.port

    def file(self, content: bytes, name: str = "some file.bin") -> str:
        path = self.files / name
        path.write_bytes(content)
        return str(path)

    @contextmanager
    def to_stock(self, *arguments: str) -> Iterator[tuple[Stock, str, str]]:
        """A stock receiver, its address, and our configuration."""
        theirs = write_config(self._space.root / "stock", [tcp_server(self.listening)])
        with self._door() as port:
            ours = write_config(self._space.root / "ours", [tcp_client(port)], **self._ours)
            into = ["--config", str(theirs), "--dir", str(self.inbox), "--print-hash", "--once"]
            with stock("receive", *into, *arguments) as receiver:
                yield receiver, receiver.line(), str(ours)

    @contextmanager
    def to_us(self, *arguments: str) -> Iterator[tuple[Running, str, str]]:
        """Our receiver, its address, and the stock configuration."""
        ours = write_config(self._space.root / "ours", [tcp_server(self.listening)], **self._ours)
        with self._door() as port:
            theirs = write_config(self._space.root / "stock", [tcp_client(port)])
            with running("receive", "--config", str(ours), "--dir", str(self.inbox), "--once", *arguments) as receiver:
                yield receiver, receiver.line(), str(theirs)


@pytest.mark.parametrize("discovery", [True, False], ids=["large-mtu", "mtu-500"])
@pytest.mark.parametrize("content", [b"", b"x", data("random", "f", 3 * MEGABYTE), TEXT * 50_000], ids=len)
def test_our_file_reaches_a_stock_peer(space: Workspace, content: bytes, discovery: bool) -> None:
    place = Place(space, link_mtu_discovery=discovery)
    with place.to_stock() as (receiver, address, config):
        code, out, err = run("send", "--config", config, place.file(content), address)
        assert code == 0, err
        digest = hashlib.sha256(content).hexdigest()
        assert out[-1] == f"sha256 {digest}, the same at the receiver"
        result = receiver.result()
        assert (result["ok"], result["size"], result["sha256"]) == (True, len(content), digest)
        assert result["saved_as"] == "some file.bin"
        assert (place.inbox / "some file.bin").read_bytes() == content


@pytest.mark.parametrize("discovery", [True, False], ids=["large-mtu", "mtu-500"])
@pytest.mark.parametrize("content", [b"", data("random", "g", MEGABYTE)], ids=len)
def test_a_file_of_a_stock_peer_reaches_us(space: Workspace, content: bytes, discovery: bool) -> None:
    place = Place(space, link_mtu_discovery=discovery)
    with place.to_us() as (receiver, address, config):
        with stock("send", "--config", config, place.file(content), address) as sender:
            result = sender.result()
            assert (result["ok"], result["saved_as"]) == (True, "some file.bin"), result
        assert receiver.wait() == 0
        assert (place.inbox / "some file.bin").read_bytes() == content


def test_what_a_stock_peer_reads_from_standard_input_reaches_us(space: Workspace) -> None:
    place = Place(space)
    with place.to_us() as (receiver, address, config):
        with stock("send", "--config", config, "-", address, stdin=subprocess.PIPE) as sender:
            assert sender.process.stdin is not None
            sender.process.stdin.write("of unknown size")
            sender.process.stdin.close()
            assert sender.result()["ok"]
        assert receiver.wait() == 0
        assert (place.inbox / "stdin").read_bytes() == b"of unknown size"


def test_a_stock_peer_refuses_us_with_its_reason(space: Workspace) -> None:
    place = Place(space)
    with place.to_stock("--max-size", "10") as (_, address, config):
        code, _, err = run("send", "--no-progress", "--config", config, place.file(b"x" * 11), address)
        assert (code, err) == (
            Exit.REFUSED,
            ["rnsfast: the receiver refused: 11 bytes are more than the 10 taken here"],
        )


def test_our_list_lets_a_stock_peer_in_that_is_on_it(space: Workspace) -> None:
    place, me = Place(space), Identity()
    me.save(space.root / "me")
    with place.to_us("--allow", me.hash.hex()) as (receiver, address, config):
        file = place.file(b"x")
        with stock("send", "--config", config, file, address) as stranger:
            result = stranger.result()
            assert not result["ok"] and "did not identify itself" in result["reason"]
        with stock("send", "--config", config, "--identity", str(space.root / "me"), file, address) as friend:
            assert friend.result()["ok"]
        assert receiver.line(f"from {me.hash.hex()}").startswith("received some file.bin")
        assert receiver.wait() == 0


def test_a_stock_receiver_that_dies_is_one_sentence(space: Workspace) -> None:
    place = Place(space)
    with place.to_stock("--events") as (receiver, address, config):
        arguments = ["send", "--no-progress", "--config", config, "-", address]
        with running(*arguments, stdin=subprocess.PIPE) as sender:
            assert sender.process.stdin is not None
            sender.process.stdin.write("x" * 1000)
            sender.process.stdin.flush()
            receiver.line('"begun"')
            receiver.process.kill()
            assert sender.wait() == Exit.FAILED
            (sentence,) = sender.err
            assert sentence.startswith("rnsfast: the link to the receiver ended after 1,000 bytes: ")


def test_a_stock_sender_that_dies_leaves_nothing(space: Workspace) -> None:
    place = Place(space)
    with place.to_us() as (receiver, address, config):
        with stock("send", "--config", config, "-", address, stdin=subprocess.PIPE) as sender:
            assert sender.process.stdin is not None
            sender.process.stdin.write("x" * 1000)
            sender.process.stdin.flush()
            wait_for_part(place.inbox)
            sender.process.kill()
        assert receiver.wait() == 1
        assert "some file" not in "".join(receiver.out)
        assert list(place.inbox.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("content", [data("random", "h", MEGABYTE), TEXT * 50_000], ids=["random", "text"])
def test_progress_over_a_slow_line_tells_the_truth(space: Workspace, content: bytes) -> None:
    place = Place(space, proxied=True)
    assert place.proxy is not None
    place.proxy.to_target.rate = 200_000
    with place.to_stock() as (receiver, address, config):
        code, out, err = run("send", "--config", config, place.file(content), address)
        assert code == 0, err
        assert no_control_characters([*out, *err])
        percents = [int(line.split("%")[0]) for line in err]
        assert percents == sorted(percents) and percents.count(100) == 1 and percents[-1] == 100
        assert all(f"of {len(content) / 1e6:.1f} MB" in line for line in err)
        found = re.fullmatch(r"([0-9,]+) bytes in ([0-9.]+) s, ([0-9.]+) (kB|MB)/s", out[1])
        assert found is not None, out
        size, seconds = int(found[1].replace(",", "")), float(found[2])
        rate = float(found[3]) * {"kB": 1e3, "MB": 1e6}[found[4]]
        assert size == len(content)
        assert abs(rate - size / seconds) <= 0.06 * rate
        if content.startswith(TEXT):
            assert re.fullmatch(r"[0-9,]+ bytes crossed the link: compressed on the way", out[2])
        else:
            assert seconds >= 4 and len(err) >= 4
        assert receiver.result()["ok"]
