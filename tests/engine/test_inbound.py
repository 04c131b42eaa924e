"""What waits for its turn, by traffic class: the vectors, fairness between interfaces, bounds."""

from __future__ import annotations

from typing import Any

import pytest

from rnsfast.engine.inbound import LENGTHS, OVERLOADS, SHARES, Inbound, TrafficClass
from rnsfast.engine.port import Port
from tests.vectors_support import vectors

QUEUED = list(LENGTHS)


def drained(inbound: Inbound) -> list[Any]:
    found: list[Any] = []
    while inbound:
        found += inbound.take()
    return found


def test_classes_are_served_and_bounded_as_by_the_reference() -> None:
    case = vectors("transport")["inbound_queues"]
    inbound = Inbound(dict(zip(TrafficClass, case["lengths"], strict=True)))
    port = Port("only")
    for kind, item, accepted in case["puts"]:
        assert inbound.put(TrafficClass(kind), port, item) is accepted, item
    assert drained(inbound) == case["drained"]
    assert [lines.dropped for lines in inbound.lines.values()] == case["dropped"]
    assert {drop: port.drops[drop] for drop in OVERLOADS.values()} == dict.fromkeys(OVERLOADS.values(), 1)


@pytest.mark.parametrize("kind", QUEUED)
def test_interfaces_take_turns_within_a_class(kind: TrafficClass) -> None:
    inbound = Inbound({kind: 5})
    ports = [Port(name) for name in "abc"]
    for port, count in zip(ports, (9, 2, 1), strict=True):
        for n in range(count):
            inbound.put(kind, port, f"{port}{n}")
    assert drained(inbound) == ["a0", "b0", "c0", "a1", "b1", "a2", "a3", "a4"]
    assert inbound.lines[kind].dropped == ports[0].drops[OVERLOADS[kind]] == 4


def test_every_class_has_its_share_of_a_helping() -> None:
    inbound = Inbound()
    port = Port("only")
    for kind in QUEUED:
        for n in range(8):
            inbound.put(kind, port, (kind, n))
    first = inbound.take()
    assert first == [(kind, n) for kind in QUEUED for n in range(SHARES[kind])]
    assert len(first) + len(drained(inbound)) == 8 * len(QUEUED)


def test_what_waits_for_an_interface_goes_with_it() -> None:
    inbound = Inbound()
    gone, other = Port("gone"), Port("other")
    for kind in QUEUED:
        inbound.put(kind, gone, "gone")
        inbound.put(kind, other, "other")
    assert [len(inbound.lines[kind]) for kind in QUEUED] == [2, 2, 2]
    inbound.leave(gone)
    inbound.leave(gone)
    assert drained(inbound) == ["other"] * 3 and not inbound


def test_pressure_is_that_of_the_fullest_line() -> None:
    inbound = Inbound()
    ports = [Port(name) for name in "ab"]
    lines = inbound.lines[TrafficClass.INGRESS_LIMITED]
    assert lines.pressure == 0
    for _ in range(20):
        inbound.put(TrafficClass.INGRESS_LIMITED, ports[0], "x")
    inbound.put(TrafficClass.INGRESS_LIMITED, ports[1], "x")
    assert lines.pressure == 1.0 and len(lines) == lines.length + 1
