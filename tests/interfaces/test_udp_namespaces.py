"""Case F12 on a real network: what arrives with one plain send a packet arrives with batches, too.

Two network namespaces joined by a veth pair, an interface of ours in a process in each. Every scenario is run twice,
with batches as the back end prefers and with batches of one, and both are compared.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from interop.harness import InteropError, Peer

pytestmark = pytest.mark.slow

HELPER = Path(__file__).with_name("udp_peer.py")
LIMIT = 20.0  # seconds for what is expected to happen at once
NEAR, FAR = "192.0.2.1", "192.0.2.2"
PORT = 4242
LARGEST = 1080  # bytes; one more is larger than anything the interface may carry
COUNTS = (1, 2, 63, 64, 65, 200)
PATTERNS: dict[str, Callable[[int], list[int]]] = {
    "all 500": lambda count: [500] * count,
    "all 1064": lambda count: [1064] * count,
    "500, the last 19": lambda count: [500] * (count - 1) + [19],
    "500 and 1064": lambda count: [500, 1064] * (count // 2) + [500] * (count % 2),
    "one too large": lambda count: [500] * (count // 2) + [LARGEST + 1] + [500] * (count - count // 2 - 1),
}
UP_AGAIN = 2.0  # seconds that the device stays down


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=LIMIT).stdout


@dataclass
class Wire:
    """The two namespaces; devices are called `near` and `far` in theirs."""

    near: str
    far: str

    def mtu(self, mtu: int) -> None:
        """The end that sends is never above the end that receives."""
        ends = [(self.near, "near"), (self.far, "far")]
        for space, device in ends if mtu < 1500 else reversed(ends):
            ip("-n", space, "link", "set", device, "mtu", str(mtu))

    def link(self, side: str, state: str) -> None:
        ip("-n", self.near if side == "near" else self.far, "link", "set", side, state)


@pytest.fixture(scope="module")
def wire() -> Iterator[Wire]:
    if sys.platform != "linux" or not hasattr(os, "geteuid") or os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need Linux, the rights of root, and the program ip")
    spaces = [f"rnsfast-{os.getpid()}-{side}" for side in ("near", "far")]
    made: list[str] = []
    try:
        try:
            for space in spaces:
                ip("netns", "add", space)
                made.append(space)
            ip("link", "add", "near", "netns", spaces[0], "type", "veth", "peer", "name", "far", "netns", spaces[1])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
        for space, device, address in zip(spaces, ("near", "far"), (NEAR, FAR), strict=True):
            ip("-n", space, "address", "add", f"{address}/24", "dev", device)
            ip("-n", space, "link", "set", "lo", "up")
            ip("-n", space, "link", "set", device, "up")
        yield Wire(*spaces)
    finally:
        for space in made:
            ip("netns", "delete", space)


class Ends:
    """A sender and a receiver."""

    def __init__(self, wire: Wire, root: Path, backend: str = "", **options: Any) -> None:
        self.wire = wire
        self.sender = self._start(wire.near, root / "near", backend)
        self.receiver = self._start(wire.far, root / "far", backend)
        self.marks = 0
        self.receiver.request("open", listen=[FAR, PORT], forward=[NEAR, PORT])
        self.sender.request("open", listen=[NEAR, PORT], forward=[FAR, PORT], **options)
        self.meet()

    @staticmethod
    def _start(space: str, root: Path, backend: str) -> Peer:
        command = ["ip", "netns", "exec", space, sys.executable, str(HELPER)]
        return Peer(command, root, environment={"RNSFAST_OSIO": backend}).start()

    def stop(self) -> None:
        self.sender.stop()
        self.receiver.stop()

    def meet(self) -> None:
        """Return when packets pass: the neighbour is known, and everything sent before has arrived or never will."""
        for _ in range(100):
            self.marks += 1
            self.sender.request("mark", number=self.marks)
            try:
                self.receiver.expect("marked", number=self.marks, timeout=0.2)
                return
            except InteropError:
                continue
        raise AssertionError("nothing arrives")

    def send(self, *batches: list[int]) -> list[tuple[int, int]]:
        """What should arrive of it: number and size."""
        first = self.sender.request("send", batches=batches)["first"]
        sizes = [size for batch in batches for size in batch]
        return [(first + place, size) for place, size in enumerate(sizes) if size <= LARGEST]

    def arrived(self, count: int) -> list[tuple[int, int]]:
        self.receiver.request("wait", count=count)
        self.receiver.expect("arrived", timeout=LIMIT)
        return self.taken()

    def taken(self) -> list[tuple[int, int]]:
        found = self.receiver.request("take")
        assert found["spoiled"] == 0
        return [(number, size) for number, size in found["packets"]]

    def carry(self, *batches: list[int]) -> None:
        """Send, and find it all at the other end, in order."""
        expected = self.send(*batches)
        if expected:
            assert self.arrived(len(expected)) == expected

    def state(self) -> dict[str, Any]:
        return self.sender.request("state")


MODES: dict[str, dict[str, Any]] = {
    "batches": {},
    "batches without segmentation": {"segmentation": False},
    "one by one": {"batch": 1},
    "the portable back end": {"backend": "portable"},
}


@pytest.fixture(params=list(MODES))
def ends(request: pytest.FixtureRequest, wire: Wire, tmp_path: Path) -> Iterator[Ends]:
    wire.mtu(1500)
    made = Ends(wire, tmp_path, **MODES[request.param])
    try:
        yield made
        check_quiet(made)
    finally:
        made.stop()
        wire.mtu(1500)


def check_quiet(ends: Ends) -> None:
    """At most one line about each way that does not work here, no reports, and an idle process in the end."""
    ends.meet()
    before = ends.state()
    ends.meet()
    after = ends.state()
    warnings = before["warnings"]
    assert sum("segmentation by the system" in line for line in warnings) <= 1
    assert sum("too large to be segmented" in line for line in warnings) <= 1
    assert len(warnings) <= 2
    assert before["reports"] == []
    assert after["turns"] - before["turns"] <= 6
    assert after["connection"]["waiting_bytes"] == 0


@pytest.mark.parametrize("mtu", [1500, 576])
def test_every_batch_arrives_ten_times_as_it_was_sent(ends: Ends, mtu: int) -> None:
    ends.wire.mtu(mtu)
    too_large = sent = 0
    for pattern in PATTERNS.values():
        for count in COUNTS:
            sizes = pattern(count)
            for _ in range(10):
                ends.carry(sizes)
            bad = sum(size > LARGEST for size in sizes)
            too_large += 10 * bad
            sent += 10 * (count - bad)
    state = ends.state()
    assert state["drops"] == {"tx.too_large": too_large}
    assert state["sent"] == sent + ends.marks
    assert state["connection"]["tx_rejected"] == too_large


def test_the_mtu_falls_and_rises_in_the_middle_of_a_stream(ends: Ends) -> None:
    mixed = [pattern(64) for name, pattern in PATTERNS.items() if name != "one too large"]
    batches = mixed * 6  # what the receiving socket holds, should nobody read it meanwhile
    sizes = [size for batch in batches for size in batch]
    for mtu in (None, 576, 1500, 576, 1500):
        number = ends.sender.begin("send", batches=batches)
        if mtu is not None:
            ends.wire.mtu(mtu)  # while they are being sent
        first = ends.sender.finish(number, LIMIT)["first"]
        assert ends.arrived(len(sizes)) == [(first + place, size) for place, size in enumerate(sizes)]
    assert ends.state()["drops"] == {}


def lose(ends: Ends, batches: list[list[int]]) -> dict[str, int]:
    """Send what cannot arrive. What it was counted as; everything is refused, at once, and costs next to nothing."""
    before = ends.state()
    ends.send(*batches)
    after = ends.state()
    packets = sum(map(len, batches))
    found = {key: count - before["drops"].get(key, 0) for key, count in after["drops"].items()}
    assert sum(found.values()) + after["sent"] - before["sent"] == packets
    assert after["connection"]["waiting_bytes"] == 0
    assert after["connection"]["tx_calls"] - before["connection"]["tx_calls"] <= 2 * packets
    return {key: count for key, count in found.items() if count}


HARD = [[500] * 64, [1064] * 65, [500] * 63 + [19], [500, 1064] * 32, [500]]
HARD_PACKETS = sum(map(len, HARD))


def test_the_device_is_down_for_two_seconds(ends: Ends) -> None:
    segmentation = ends.state()["segmentation"]
    ends.carry(*HARD)
    ends.wire.link("near", "down")
    assert lose(ends, HARD) == {"tx.unreachable": HARD_PACKETS}
    before = ends.state()
    threading.Event().wait(UP_AGAIN)
    after = ends.state()
    assert after["turns"] - before["turns"] <= 3  # the commands themselves
    assert after["cpu"] - before["cpu"] < 0.2
    assert lose(ends, HARD) == {"tx.unreachable": HARD_PACKETS}
    ends.wire.link("near", "up")
    ends.meet()
    assert ends.taken() == []
    ends.carry(*HARD)
    assert ends.state()["segmentation"] == segmentation


def test_the_device_of_the_other_end_is_down(ends: Ends) -> None:
    """Nothing tells the sender; what the system still takes is lost, and nothing goes wrong afterwards."""
    ends.carry(*HARD)
    ends.wire.link("far", "down")
    lose(ends, HARD)
    before = ends.state()
    threading.Event().wait(UP_AGAIN)
    after = ends.state()
    assert after["turns"] - before["turns"] <= 3
    assert after["cpu"] - before["cpu"] < 0.2
    ends.wire.link("far", "up")
    ends.meet()
    late = ends.taken()
    assert late == sorted(set(late))  # what was kept for the neighbour comes once, and in order
    ends.carry(*HARD)


def test_the_route_is_removed_and_comes_back(ends: Ends) -> None:
    segmentation = ends.state()["segmentation"]
    ends.carry(*HARD)
    ip("-n", ends.wire.near, "route", "delete", "192.0.2.0/24", "dev", "near")
    assert lose(ends, HARD) == {"tx.unreachable": HARD_PACKETS}
    ip("-n", ends.wire.near, "route", "add", "192.0.2.0/24", "dev", "near", "src", NEAR)
    ends.meet()
    assert ends.taken() == []
    ends.carry(*HARD)
    ip("-n", ends.wire.near, "route", "add", "unreachable", f"{FAR}/32")
    assert lose(ends, HARD) == {"tx.unreachable": HARD_PACKETS}
    ip("-n", ends.wire.near, "route", "delete", "unreachable", f"{FAR}/32")
    ends.meet()
    ends.carry(*HARD)
    assert ends.state()["segmentation"] == segmentation


def test_a_closed_port_is_opened(ends: Ends) -> None:
    ends.receiver.request("close")
    assert lose(ends, HARD) == {}  # an answer to a datagram that went out says nothing about the next
    ends.receiver.request("open", listen=[FAR, PORT], forward=[NEAR, PORT])
    ends.meet()
    assert ends.taken() == []
    ends.carry(*HARD)
    assert ends.state()["drops"] == {}
