"""Timeouts, pings, silence and round trip times of links, in virtual time.  Protocol 03, sections 7, 8 and 13."""

from __future__ import annotations

from math import inf

import pytest

from rnsfast.crypto.ed25519 import SigningKey
from rnsfast.engine.link import PING, PONG
from rnsfast.engine.linkstate import (
    GRACE_RTT_FACTOR,
    INITIATOR_STALE_FLOOR,
    STALE_FACTOR,
    STALE_GRACE,
    State,
    initiator_timeout,
    keepalive_for,
    responder_timeout,
)
from rnsfast.wire.handshake import build_rtt
from rnsfast.wire.packet import CTX_CHANNEL, CTX_KEEPALIVE, CTX_LINKCLOSE, CTX_LRRTT, CTX_NONE, make_raw
from rnsfast.wire.proof import link_proof_packet
from tests.engine.support import LINK_ID, NOW, make_link, sealed, sent
from tests.vectors_support import Case, by_name, vectors
from tests.virtualnet import VirtualNet

TOLERANCE = 5.0  # seconds: the reference looks at its clock that rarely


@pytest.mark.parametrize("case", vectors("link", "timing", "rtt_derived"), ids=lambda c: str(c["rtt"]))
def test_times_derived_from_the_round_trip(case: Case) -> None:
    link, _, _ = make_link(rtt=case["rtt"])
    assert keepalive_for(case["rtt"]) == pytest.approx(case["keepalive"], rel=1e-12)
    assert keepalive_for(case["rtt"]) * STALE_FACTOR == pytest.approx(case["stale_time"], rel=1e-12)
    assert link.packet_timeout == pytest.approx(case["packet_receipt_timeout"], rel=1e-12)
    assert GRACE_RTT_FACTOR * case["rtt"] + STALE_GRACE == pytest.approx(case["stale_to_close"], rel=1e-12)


@pytest.mark.parametrize("case", vectors("link", "timing", "initiator_establishment"), ids=str)
def test_initiator_patience(case: Case) -> None:
    found = initiator_timeout(case["hops"], case["next_hop_bitrate"])
    assert found == pytest.approx(case["initiator_timeout"], rel=1e-12)


@pytest.mark.parametrize("case", vectors("link", "timing", "responder_establishment"), ids=str)
def test_responder_patience(case: Case) -> None:
    assert responder_timeout(case["hops_after_increment"]) == case["responder_timeout"]


def watch(case: Case, floor: float = 0.0) -> list[tuple[float, str]]:
    """The link of a vector on a simulated clock; the peer answers as the case says. Times since the start."""
    initiator = case["end"] == "initiator"
    established = case["rtt"] is not None
    before = State.ACTIVE if established else (State.PENDING if initiator else State.HANDSHAKE)
    link, _, port = make_link(initiator=initiator, rtt=case["rtt"] or 0.0, state=before)
    engine = link.engine
    if established:
        link.keepalive, link.stale_time = case["keepalive"], max(case["stale_time"], floor)
        link.last_inbound = NOW
        link.arm(link._next_check())
    else:
        link.establishment_timeout = case["establishment_timeout"]
        link.arm(NOW + link.establishment_timeout)
    answers = any(e["event"] == "receive_keepalive" for e in case["events"])
    seen: list[tuple[float, str]] = []
    state = link.state
    while (now := engine.timers.deadline) <= NOW + case["limit"] and now < inf and link.is_open:
        engine.run_timers(now)
        for raw in sent(port):
            at = now - NOW
            if raw[18] == CTX_KEEPALIVE:
                assert raw[19:] == PING and len(raw) == 20
                seen.append((at, "send_keepalive"))
                if answers:
                    engine.receive(port, [make_raw(0x0C, LINK_ID, CTX_KEEPALIVE, PONG)], now)
                    seen.append((at, "receive_keepalive"))
            else:
                assert raw[18] == CTX_LINKCLOSE
                seen.append((at, "send_linkclose"))
        if link.state is not state:
            state = link.state
            seen.append((now - NOW, f"status_{int(state)}"))
    if case["teardown_reason"] is not None and floor == 0:
        assert link.reason == case["teardown_reason"]
    return seen


@pytest.mark.parametrize("case", vectors("link", "watchdog"), ids=by_name)
def test_watchdog(case: Case) -> None:
    seen, expected = watch(case), [(e["t"], e["event"]) for e in case["events"]]
    assert [what for _, what in seen] == [what for _, what in expected]
    for (at, what), (recorded, _) in zip(seen, expected, strict=True):
        assert recorded - TOLERANCE <= at <= recorded + TOLERANCE, (what, at, recorded)
    for at, what in seen:  # and exactly by the formulas
        if what == "status_3":
            assert at == pytest.approx(case["stale_time"])
        elif what == "send_linkclose":
            assert at == pytest.approx(case["stale_time"] + GRACE_RTT_FACTOR * case["rtt"] + STALE_GRACE)


def test_an_initiator_is_patient_with_idle_links() -> None:
    """A reference responder with a longer round trip time leaves pings unanswered: 60 s cost nothing (trap T6)."""
    case = next(c for c in vectors("link", "watchdog") if c["name"] == "initiator_peer_slower_rtt")
    seen = watch({**case, "limit": 100}, INITIATOR_STALE_FLOOR)
    stale = [at for at, what in seen if what == "status_3"]
    pings = [at for at, what in seen if what == "send_keepalive"]
    assert stale == [60.0] and pings == pytest.approx([5.0 * n for n in range(1, len(pings) + 1)])
    net = VirtualNet(seed=3)
    link, _, _, _ = net.linked()
    assert link.stale_time == INITIATOR_STALE_FLOOR and link.engine.initiator_stale_floor == INITIATOR_STALE_FLOOR


def test_idle_links_live_in_both_roles() -> None:
    net = VirtualNet(seed=3)
    link, peer, _, _ = net.linked(delay=0.005)
    net.run(600)
    assert link.state is peer.state is State.ACTIVE
    assert 600 / 5 - 5 < sum(raw[18] == CTX_KEEPALIVE for raw in net.wires[0].sent) < 600 / 5 + 5


def test_every_ping_is_answered_and_nothing_else() -> None:
    link, _, port = make_link()
    ping, pong = (make_raw(0x0C, LINK_ID, CTX_KEEPALIVE, c) for c in (PING, PONG))
    for raw, answered in (
        (ping, True),
        (ping, True),
        (pong, False),
        (ping[:-1] + b"\x00", False),
        (ping + b"x", False),
    ):
        link.engine.receive(port, [raw], NOW + 1)
        assert bool(sent(port)) is answered


def test_an_initiator_that_only_receives_pings_too() -> None:
    link, _, port = make_link(initiator=True, rtt=0.01)
    link.keepalive, link.stale_time = 5.0, 60.0
    link.arm(NOW + 5)
    for second in range(1, 12):
        now = NOW + second
        link.engine.receive(port, [sealed(CTX_NONE, b"x", second.to_bytes(16, "big"))], now)
        link.engine.run_timers(now)
    assert [raw[18] for raw in sent(port)].count(CTX_KEEPALIVE) == 2


def test_stale_comes_back_with_an_authentic_packet_only() -> None:
    link, _, port = make_link(rtt=0.01)
    link.arm(NOW)
    link.keepalive, link.stale_time = 5.0, 10.0
    link.engine.run_timers(NOW + 10)
    assert link.state is State.STALE
    forged = sealed(CTX_NONE, b"x", bytes(16), key=bytes(64))
    link.engine.receive(port, [forged], NOW + 11)
    assert link.state is State.STALE
    link.engine.receive(port, [sealed(CTX_NONE, b"x", bytes(16))], NOW + 12)
    assert link.state is State.ACTIVE and link.last_inbound == NOW + 12
    sent(port)
    link.engine.run_timers(NOW + 21.9)
    assert link.state is State.ACTIVE and not sent(port)
    link.engine.run_timers(NOW + 22)
    assert link.state is State.STALE


def test_a_proof_revives_a_stale_link() -> None:
    """Whoever proves a packet has the key of the peer: closing such a link would be a mistake."""
    key = SigningKey(b"p" * 32)
    link, _, port = make_link(rtt=0.01, peer=key)
    link.arm(NOW)
    link.keepalive, link.stale_time = 5.0, 10.0
    link.engine.run_timers(NOW + 10)
    receipt = link.send_data(b"x", NOW + 10)
    assert receipt is not None and link.state is State.STALE
    forged = link_proof_packet(LINK_ID, receipt.packet_hash, bytes(64))
    link.engine.receive(port, [forged], NOW + 10.1)
    assert link.state is State.STALE
    link.engine.receive(
        port, [link_proof_packet(LINK_ID, receipt.packet_hash, key.sign(receipt.packet_hash))], NOW + 10.2
    )
    assert link.state is State.ACTIVE
    link.engine.run_timers(NOW + 20.1)
    assert link.state is State.ACTIVE
    link.engine.run_timers(NOW + 20.2)
    assert link.state is State.STALE


# ---------------------------------------------------------------------- the round trip time packet


def handshake_link(now: float = NOW):
    link, recorder, port = make_link(state=State.HANDSHAKE, now=now)
    link.arm(now + link.establishment_timeout)
    return link, recorder, port


def test_round_trip_is_the_larger_of_two() -> None:
    for told, waited, expected in ((0.2, 0.1, 0.2), (0.1, 0.3, 0.3), (float("nan"), 0.1, 0.1), (-1.0, 0.1, 0.1)):
        link, recorder, port = handshake_link()
        link.engine.receive(port, [sealed(CTX_LRRTT, build_rtt(told), bytes(16))], NOW + waited)
        assert link.rtt == pytest.approx(expected) and len(recorder.named("link_established")) == 1


def test_a_lost_round_trip_packet_is_made_up_for_by_the_first_that_opens() -> None:
    for context in (CTX_NONE, CTX_CHANNEL):
        link, recorder, port = handshake_link()
        plain = b"\x01\x01\x00\x00\x00\x01x"
        forged = sealed(context, plain, bytes(16), key=bytes(64))
        link.engine.receive(port, [forged], NOW + 0.1)
        assert link.state is State.HANDSHAKE and not recorder.events
        link.engine.receive(port, [forged, sealed(context, plain, b"1" * 16)], NOW + 0.2)
        assert link.state is State.ACTIVE and link.rtt == pytest.approx(0.2)
        assert recorder.events[0][0] == "link_established"
        assert link.keepalive == pytest.approx(keepalive_for(0.2))


def test_a_round_trip_packet_that_comes_late_updates_once() -> None:
    link, recorder, port = handshake_link()
    link.engine.receive(port, [sealed(CTX_NONE, b"early", bytes(16))], NOW + 0.1)
    link.engine.receive(port, [sealed(CTX_LRRTT, build_rtt(0.4), b"1" * 16)], NOW + 0.15)
    assert link.rtt == 0.4 and link.keepalive == pytest.approx(keepalive_for(0.4))
    link.engine.receive(port, [sealed(CTX_LRRTT, build_rtt(9.0), b"2" * 16)], NOW + 0.2)
    assert link.rtt == 0.4 and len(recorder.named("link_established")) == 1


def test_what_comes_after_a_long_pause_is_no_measure_of_the_round_trip() -> None:
    """With the RTT packet lost, an application may speak minutes later: a link of 300 s round trip would be useless."""
    link, _, port = handshake_link()
    link.engine.receive(port, [sealed(CTX_NONE, b"hello?", bytes(16))], NOW + 300)
    assert link.state is State.ACTIVE and link.rtt <= 6.0


def test_an_unreadable_round_trip_packet_closes_in_handshake_only() -> None:
    link, recorder, port = handshake_link()
    link.engine.receive(port, [sealed(CTX_LRRTT, b"\xc0", bytes(16))], NOW + 0.1)
    assert link.state is State.CLOSED and [raw[18] for raw in sent(port)] == [CTX_LINKCLOSE] and not recorder.events
    link, _, port = make_link()
    link.engine.receive(port, [sealed(CTX_LRRTT, b"\xc0", bytes(16))], NOW + 0.1)
    assert link.state is State.ACTIVE and not sent(port)
