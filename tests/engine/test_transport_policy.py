"""What an interface lets in and out, against the vectors: modes, frequencies, bursts, egress."""

from __future__ import annotations

from typing import Any

import pytest

from rnsfast.engine.port import Policy, Port
from rnsfast.engine.transport.ingress import Frequency, Intake
from rnsfast.engine.transport.modes import Passage, passage
from rnsfast.interfaces.common import MODES
from tests.vectors_support import Case, vectors

INGRESS = vectors("interfaces", "ingress")


def matrix_id(case: Case) -> str:
    return "-".join(f"{value}" for value in case.values())


@pytest.mark.parametrize("case", vectors("transport", "announce_mode_matrix"), ids=matrix_id)
def test_modes_decide_what_is_passed_on(case: Case) -> None:
    out = Port(
        "out",
        mode=MODES[case["out_mode"]],
        policy=Policy(announces_from_internal=case.get("out_announces_from_internal", True)),
    )
    name = case["path_interface_mode"]
    source: Port | None = None
    if name not in ("no_path", "local"):
        allowed = case.get("path_interface_announces_to_internal")
        source = Port("in", mode=MODES[name], policy=Policy(announces_to_internal=allowed))
    verdict = passage(out, source, 0 if name == "local" else 2, local=name == "local")
    assert (verdict is not Passage.BLOCKED) is case["transmitted"]


@pytest.mark.parametrize("case", INGRESS["limits"], ids=lambda case: case["case"])
def test_bursts_begin_and_end_as_in_the_reference(case: Case) -> None:
    overrides: dict[str, Any] = dict(case["overrides"])
    policy = Policy(**{key: value for key, value in overrides.items() if hasattr(Policy(), key)})
    base = 1_700_000_000.0  # the reference's clock: quotients come out as they do there
    intake = Intake(Port("in", policy=policy), base - float(case["age_at_start_s"]))
    announces = case["kind"] == "announce"
    frequency = intake.announces if announces else intake.requests
    for at, event, limited in case["log"]:
        if event:
            frequency.note(base + at)
        found = intake.is_announce_burst(base + at) if announces else intake.is_request_burst(base + at)
        assert found is limited, at


@pytest.mark.parametrize("name", ["hold_and_release"])
def test_what_is_held_is_the_newest_of_each_and_the_nearest_goes_first(name: str) -> None:
    case = INGRESS[name]
    intake = Intake(Port("in", policy=Policy(ic_max_held_announces=case["max_held"])), 0.0)
    for hold in case["holds"]:
        raw = bytes.fromhex(hold["raw"])
        intake.hold(bytes.fromhex(hold["destination"]), raw[:1] + bytes((hold["hops"],)) + raw[2:])
    assert len(intake.held) <= case["max_held"]
    hops = [held.hops for held in intake.held.values()]
    assert 127 not in hops
    now, found = 100.0, []
    while intake.held:
        now += 6.0
        released = intake.release(now)
        assert released is not None
        found.append(released[1])
    assert found == sorted(hops)


def test_path_requests_of_others_are_withheld_as_in_the_reference() -> None:
    base = 1_700_000_000.0
    intake = Intake(Port("out", policy=Policy(egress_control=True)), base)
    for at, refused in INGRESS["egress_path_requests"]:
        assert intake.is_egress_limited(base + at) is refused, at
        if not refused:
            intake.outgoing_requests.note(base + at)


def test_a_frequency_needs_three_samples() -> None:
    frequency = Frequency()
    assert frequency.rate(0.0) == 0
    for at in (0.0, 0.5, 1.0):
        frequency.note(at)
    assert frequency.rate(1.0) == 3.0
