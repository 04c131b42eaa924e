"""When a receiver announces, and when it leaves."""

from __future__ import annotations

import signal
from queue import Empty
from typing import Any

import pytest

from rnsfast.cli import receive
from rnsfast.cli.common import Stopped
from rnsfast.files import Report


class Script:
    """Stands in for the events and the clock: each step is (seconds until it, what happens)."""

    def __init__(self, *steps: tuple[float, Any]) -> None:
        self.now = 1000.0
        self._steps = [*steps, (0.0, Stopped(signal.SIGTERM))]
        self._next = self.now + self._steps[0][0]

    def get(self, timeout: float | None = None) -> Any:
        if timeout is not None and self.now + timeout < self._next:
            self.now += timeout
            raise Empty
        self.now = self._next
        event = self._steps.pop(0)[1]
        self._next = self.now + (self._steps[0][0] if self._steps else 0.0)
        return event

    def put(self, item: Any) -> None:
        raise AssertionError("nobody else puts")


class FakeReceiver:
    def __init__(self, script: Script, up: bool = True) -> None:
        self._script, self.up = script, up
        self.announced: list[float] = []

    def announce(self) -> bool:
        if self.up:
            self.announced.append(self._script.now - 1000.0)
        return self.up


def serve(
    monkeypatch: pytest.MonkeyPatch, script: Script, *, once: bool = False, interval: float = 100.0
) -> tuple[int, list[float]]:
    receiver = FakeReceiver(script)
    monkeypatch.setattr(receive, "monotonic", lambda: script.now)
    code = receive._serve(receiver, script, once, interval)  # type: ignore[arg-type]
    return code, receiver.announced


def report(**fields: Any) -> Report:
    defaults = {"ok": True, "accepted": True, "name": "a", "saved_as": "a", "size": 3, "sha256": bytes(32)}
    return Report(**{**defaults, "reason": None, "seconds": 1.0, "peer": None, **fields})


def test_it_announces_at_once_and_then_at_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    code, announced = serve(monkeypatch, Script((250.0, report())))
    assert announced == [0.0, 100.0, 200.0]
    assert code == 128 + signal.SIGTERM


def test_an_interface_that_comes_up_is_told_and_the_interval_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    _, announced = serve(monkeypatch, Script((30.0, receive.InterfaceUp()), (110.0, report())))
    assert announced == [0.0, 30.5, 130.5]


def test_a_connection_that_has_just_come_up_is_left_alone_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stock client is not ready for packets when its connection is: it would drop it and come again in 5 s."""
    script = Script((10.0, receive.InterfaceUp()), (0.4, report()), (100.0, report()))
    _, announced = serve(monkeypatch, script, interval=0)
    assert announced == [0.0, 10.5]


def test_many_connections_are_told_together(monkeypatch: pytest.MonkeyPatch) -> None:
    ups = [(0.01, receive.InterfaceUp())] * 100
    _, announced = serve(monkeypatch, Script(*ups, (10.0, report())))
    assert announced == [0.0, pytest.approx(5.0)]


def test_without_an_interval_only_interfaces_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    _, announced = serve(monkeypatch, Script((1e6, receive.InterfaceUp()), (1e6, report())), interval=0)
    assert announced == [0.0, 1e6 + 0.5]


def test_without_an_interface_it_waits_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script((10.0, receive.InterfaceUp()), (1e6, report()))
    receiver = FakeReceiver(script, up=False)
    monkeypatch.setattr(receive, "monotonic", lambda: script.now)
    assert receive._serve(receiver, script, False, 100.0) == 128 + signal.SIGTERM  # type: ignore[arg-type]
    assert receiver.announced == []


@pytest.mark.parametrize(("ok", "code"), [(True, 0), (False, 1)])
def test_once_leaves_after_an_accepted_transfer(monkeypatch: pytest.MonkeyPatch, ok: bool, code: int) -> None:
    refused = report(ok=False, accepted=False, reason="no")
    script = Script((1.0, refused), (1.0, report(ok=ok, reason=None if ok else "why")))
    assert serve(monkeypatch, script, once=True)[0] == code


def test_each_transfer_is_a_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    failed = report(ok=False, name="b\x1b[2J", saved_as=None, reason="the disk is full", peer=bytes(16))
    refused = report(ok=False, accepted=False, name=None, reason="no")
    serve(monkeypatch, Script((1.0, report(size=2_000_000)), (1.0, failed), (1.0, refused)))
    out, err = capsys.readouterr()
    assert out == f"received a: 2,000,000 bytes in 1.00 s, 2.0 MB/s, sha256 {'00' * 32}\n"
    assert err.splitlines() == [
        f"rnsfast: b\\x1b[2J from {'00' * 16} did not arrive: the disk is full",
        "rnsfast: something was refused: no",
    ]
