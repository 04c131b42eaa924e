"""The self-test says what was chosen, and fails where something else was expected."""

from __future__ import annotations

import json
import socket
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from rnsfast.osio import selftest
from rnsfast.osio.backend import family
from rnsfast.osio.contract import RxBatch
from rnsfast.osio.device import DeviceError
from rnsfast.osio.utun import UtunIO
from tests.osio.darwin_fakes import Kernel

SHORT = ["--seconds", "0.05"]


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str | None) -> Any:
        raise DeviceError("devices are left alone here")

    monkeypatch.setattr(selftest, "open_tun", refuse)
    monkeypatch.delenv("RNSFAST_EXPECT", raising=False)


def test_it_reports_every_kind_and_writes_it_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "native.json"
    assert selftest.main([*SHORT, "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert set(report["backends"]) == {"stream", "datagram", "datagram, connected", "tun"}
    assert [entry["way"] for entry in report["benchmarks"]["udp"]] == ["one by one", "batch", "one by one"]
    assert all(entry["packets"] and not entry["lost"] for entry in report["benchmarks"]["udp"])
    assert report["benchmarks"]["tun"] == "skipped: devices are left alone here"
    assert report["backends"]["datagram"]["answers"] == selftest.BURST
    said = capsys.readouterr().out
    assert (
        report["backends"]["datagram"]["backend"] in said and "packets/s" in said and "devices are left alone" in said
    )


@pytest.mark.linux
def test_what_is_expected_and_chosen_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    if family() != "linux":
        pytest.skip("this Linux has the portable back ends only")
    monkeypatch.setenv("RNSFAST_EXPECT", "linux-mmsg,stream-linux")
    assert selftest.main(SHORT) == 0


def test_what_is_expected_and_not_chosen_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RNSFAST_OSIO", "portable")
    monkeypatch.setenv("RNSFAST_EXPECT", "darwin-msgx,portable,darwin-utun")
    assert selftest.main(SHORT) == 1
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("PROBLEM")]
    assert said == [f"PROBLEM: {name} was expected and not chosen" for name in ("darwin-msgx", "darwin-utun")]


def report_of(**changes: Any) -> dict[str, Any]:
    entry = {"backend": "darwin-msgx", "fallbacks": {}}
    rounds = [{"packets": 5, "foreign": 0}]
    return {"backends": {"datagram": {**entry, **changes}}, "benchmarks": {"udp": rounds}}


def test_a_call_that_was_given_up_is_a_failure_where_the_back_end_was_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    given_up = {"sendmsg_x": "ENOSYS"}
    assert selftest.finish(report_of(fallbacks=given_up))["problems"] == []
    monkeypatch.setenv("RNSFAST_EXPECT", "darwin-msgx")
    assert selftest.finish(report_of())["problems"] == []
    assert selftest.finish(report_of(fallbacks=given_up))["problems"] == [
        "darwin-msgx was expected, and gave up sendmsg_x: ENOSYS"
    ]


@pytest.mark.parametrize(("packets", "foreign"), [(0, 0), (5, 1)])
def test_a_loopback_that_loses_everything_or_invents_packets_is_a_failure(packets: int, foreign: int) -> None:
    report = report_of()
    report["benchmarks"]["udp"] = [{"packets": packets, "foreign": foreign}]
    assert len(selftest.finish(report)["problems"]) == 1


class Device:
    """A device whose kernel is a pair of sockets."""

    name = "utun9"

    def __init__(self, near: socket.socket) -> None:
        self.io = UtunIO(near, sys=Kernel())
        self.did: list[str] = []

    def add_address(self, address: str) -> None:
        self.did.append(address)

    def up(self) -> None:
        self.did.append("up")

    def close(self) -> None:
        self.io.close()


@pytest.mark.linux
def test_a_device_is_measured_and_closed(monkeypatch: pytest.MonkeyPatch, stack: ExitStack) -> None:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    stack.callback(far.close)
    device = Device(near)
    monkeypatch.setattr(selftest, "open_tun", lambda name: device)

    class Sender:
        """As a datagram socket whose packets leave through the device."""

        def sendto(self, item: bytes, where: tuple[str, int]) -> int:
            head = b"\x45" + bytes(15) + socket.inet_aton(where[0]) + bytes(8)
            return far.send(b"\0\0\0\x02" + head + item)

    real = selftest.measure_device
    monkeypatch.setattr(selftest, "measure_device", lambda tun, sock, seconds: real(tun, Sender(), seconds))  # type: ignore[arg-type]
    report = selftest.run(0.05)
    assert device.did == ["198.18.77.1/24", "up"]
    assert report["backends"]["tun"]["backend"] == "darwin-utun"
    assert all(entry["packets"] and not entry["lost"] for entry in report["benchmarks"]["tun"])
    assert device.io.fileno() == -1


def test_a_device_that_cannot_be_set_up_is_closed(monkeypatch: pytest.MonkeyPatch, stack: ExitStack) -> None:
    near, far = socket.socketpair()
    stack.callback(far.close)
    device = Device(near)
    monkeypatch.setattr(selftest, "open_tun", lambda name: device)

    def refuse(*_: Any) -> Any:
        raise DeviceError("no addresses today")

    monkeypatch.setattr(selftest, "measure_device", refuse)
    report = selftest.run(0.01)
    assert report["benchmarks"]["tun"] == "skipped: no addresses today"
    assert report["backends"]["tun"]["name"] == "utun9" and device.io.fileno() == -1


def test_losses_are_counted() -> None:
    class Half:
        """Delivers half of a burst and one packet of somebody else."""

        left = 0

        def make_batch(self) -> RxBatch:
            return RxBatch(4, 10)

        def recv(self, into: RxBatch, timeout: float | None = 0.0) -> int:
            if not self.left:
                return 0
            self.left -= 1
            into.clear()
            into.add(b"mine" if self.left else b"foreign")
            return 1

    io = Half()

    def emit(_batched: bool) -> int:
        io.left = 5
        return 8

    for entry in selftest.measure(io, emit, lambda packet: packet == b"mine", 0.003):  # type: ignore[arg-type]
        bursts = entry["foreign"]
        assert bursts >= 1 and entry["packets"] == 4 * bursts and entry["lost"] == 4 * bursts


def test_the_system_is_named() -> None:
    assert selftest.describe_system()["python"].startswith(f"{sys.version_info.major}.")
