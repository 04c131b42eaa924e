"""Links of others in transit, against the vectors.  Protocol 03, sections 9.2 and 10."""

from __future__ import annotations

from typing import Any

import pytest

from rnsfast.crypto.identity import Identity
from rnsfast.engine.engine import Engine
from rnsfast.engine.known import Path
from rnsfast.engine.linktable import IDLE_LIFETIME, UNPROVED_LIMIT, LinkTable, clamp_request
from rnsfast.engine.port import Port
from rnsfast.engine.transport.relay import Relay
from rnsfast.wire.drop import Drop
from rnsfast.wire.packet import CTX_LRPROOF, Packet, link_id, make_raw, parse_packet
from tests.vectors_support import Case, by_name, unhex, vectors
from tests.virtualnet import Recorder

NOW = 1000.0


def port(name: str, hw_mtu: int | None = 16384, fixed: bool = True, autoconfigure: bool = False) -> Port:
    """`hw_mtu` None: too slow for any, so 500 and not upgradable."""
    made = Port(name, hw_mtu=hw_mtu or 500, upgradable=hw_mtu is not None and (fixed or autoconfigure))
    made.online = True
    return made


def path_over(out: Port, hops: int = 1, next_hop: bytes = b"n" * 16) -> Path:
    return Path(0.0, next_hop, hops, 1e12, [], out, bytes(32))


def parsed(raw: bytes) -> Packet:
    packet = parse_packet(raw)
    assert isinstance(packet, Packet)
    return packet


@pytest.mark.parametrize("case", vectors("link", "transit_clamp"), ids=by_name)
def test_clamping(case: Case) -> None:
    previous, following = port("previous", **case["previous_hop"]), port("next", **case["next_hop"])
    table, raw = LinkTable(), unhex(case["in"])
    out = table.enter(previous, parsed(raw), raw, path_over(following), NOW)
    if case["out"] is None:
        assert out is Drop.LINK_MODE_CLAMPED and case["protocol_violation"]
    else:
        assert isinstance(out, bytes) and out.hex() == case["out"]
        assert out[-3:].hex() == case["out_signalling"] or not case["out_signalling"]
        assert link_id(out) == link_id(raw)
    assert (unhex(case["link_id"]) in table) is case["link_table_entry"]


def relayed(table: LinkTable, source: Port, ports: list[Port], raw: bytes, now: float) -> tuple[Port, bytes] | Drop:
    """What a relay with this table makes of one packet."""
    engine = Engine(Recorder(), now, transport=True)  # type: ignore[arg-type]
    for each in ports:
        each.drops.clear()
        engine.attach(each, now)
    assert Relay(engine, table).forward(source, [raw], now) in ([], [raw])
    sent = [(each, packet) for each in ports for packet in each.take()]
    if sent:
        (result,) = sent
        return result
    return next(iter(source.drops), Drop.NO_SUCH_LINK)


class Transit:
    def __init__(self, case: Case) -> None:
        self.case, self.table = case, LinkTable()
        self.ports = {"previous": port("previous"), "next": port("next")}
        self.path = path_over(self.ports["next"], case["path"]["hops"], unhex(case["path"]["next_hop"]))
        self.identity = Identity.from_public(unhex(case["destination_public"])) if case["identity_known"] else None
        raw = unhex(case["request_in"])
        out = self.table.enter(self.ports["previous"], parsed(raw), raw, self.path, NOW)
        assert isinstance(out, bytes) and out.hex() == case["request_out"]

    @property
    def entry(self) -> Any:
        return self.table.get(unhex(self.case["link_id"]))

    def give(self, side: str, raw: bytes) -> tuple[Port, bytes] | Drop:
        if raw[18] == CTX_LRPROOF and raw[0] & 3 == 3:
            return self.table.prove(self.ports[side], raw, self.identity, self.path, NOW + 1)
        return self.data(side, raw, NOW + 1)

    def data(self, side: str, raw: bytes, now: float) -> tuple[Port, bytes] | Drop:
        return relayed(self.table, self.ports[side], list(self.ports.values()), raw, now)


@pytest.mark.parametrize("case", vectors("link", "transit_link"), ids=by_name)
def test_relaying(case: Case) -> None:
    transit = Transit(case)
    assert transit.entry.taken == case["taken_hops"]
    for step in case["steps"]:
        result = transit.give(step["arrives_on"], unhex(step["raw"]))
        out: dict[str, list[str]] = {"previous": [], "next": []}
        if not isinstance(result, Drop):
            side = next(name for name, p in transit.ports.items() if p is result[0])
            out[side].append(result[1].hex())
        assert (out["previous"], out["next"]) == (step["sent_on_previous"], step["sent_on_next"]), step["frame"]
        assert transit.entry.validated is step["validated"]
        assert transit.entry.remaining == step["remaining_hops"] and transit.path.hops == step["path_hops"]
        violation = isinstance(result, Drop) and (
            result.value.startswith("violation.") or result is Drop.LINK_SIGNATURE
        )
        assert violation is step["protocol_violation"], result


GOOD = next(case for case in vectors("link", "transit_link") if case["name"] == "good")
PROOF = unhex(GOOD["steps"][0]["raw"])


def test_a_replayed_request_takes_no_link_away() -> None:
    """Neither one that runs nor one that waits for its proof: the first copy counts at the responder, too (T4)."""
    transit = Transit(GOOD)
    raw = unhex(GOOD["request_in"])
    elsewhere = port("elsewhere")
    changed = raw[:-3] + b"\x20\x20\x00"
    for attempt in (raw, changed):
        assert transit.table.enter(elsewhere, parsed(attempt), attempt, transit.path, NOW + 1) is Drop.LINK_REPEATED
    result = transit.give("next", PROOF)
    assert not isinstance(result, Drop) and result[0] is transit.ports["previous"]
    late = NOW + 500
    assert transit.table.enter(elsewhere, parsed(raw), raw, transit.path, late) is Drop.LINK_REPEATED
    assert transit.entry.previous_port is transit.ports["previous"]


def test_a_forged_proof_leaves_the_entry_usable() -> None:
    transit = Transit(GOOD)
    for at in (19, 60, 90, 117):
        forged = PROOF[:at] + bytes((PROOF[at] ^ 1,)) + PROOF[at + 1 :]
        assert transit.give("next", forged) is Drop.LINK_SIGNATURE
    assert transit.give("next", PROOF[:-1]) is Drop.LINK_PROOF_SIZE
    assert transit.give("next", PROOF[:-3]) is Drop.LINK_SIGNATURE  # signed with the three bytes
    assert transit.give("previous", PROOF) is Drop.NOT_FORWARDED and not transit.entry.validated
    assert not isinstance(transit.give("next", PROOF), Drop) and transit.entry.validated


def test_rebalancing_happens_before_validation_only() -> None:
    transit = Transit(GOOD)
    far = PROOF[:1] + b"\x05" + PROOF[2:]
    assert not isinstance(transit.give("next", PROOF), Drop)
    assert transit.give("next", far) is Drop.LINK_HOPS and transit.entry.remaining == 1


def test_hops_stay_below_128() -> None:
    transit = Transit(GOOD)
    assert transit.give("next", PROOF[:1] + b"\x7f" + PROOF[2:]) is Drop.NOT_FORWARDED
    raw = unhex(GOOD["request_in"])
    raw = raw[:1] + b"\x7f" + raw[2:]
    assert LinkTable().enter(transit.ports["previous"], parsed(raw), raw, transit.path, NOW) is Drop.TOO_MANY_HOPS


def test_both_ways_over_one_interface() -> None:
    case = GOOD
    table, both = LinkTable(), port("both")
    raw = unhex(case["request_in"])
    path = path_over(both)
    table.enter(both, parsed(raw), raw, path, NOW)
    identity = Identity.from_public(unhex(case["destination_public"]))
    assert table.prove(both, PROOF, identity, path, NOW) == (both, PROOF[:1] + b"\x01" + PROOF[2:])
    other = port("other")
    for hops, passes in ((0, True), (1, True), (2, False), (3, False)):  # remaining is 1, taken 2
        data = make_raw(0x0C, unhex(case["link_id"]), 0, b"x", hops)
        assert isinstance(relayed(table, both, [both, other], data, NOW), Drop) is not passes
    data = make_raw(0x0C, unhex(case["link_id"]), 0, b"x")
    assert relayed(table, other, [both, other], data, NOW) is Drop.LINK_HOPS


def test_entries_end() -> None:
    waiting, running = Transit(GOOD), Transit(GOOD)
    running.give("next", PROOF)
    assert waiting.table.clean(waiting.entry.deadline) == []
    entry = waiting.entry
    assert waiting.table.clean(entry.deadline + 0.1) == [entry] and waiting.entry is None
    assert entry.deadline == pytest.approx(NOW + 6 + 4000 / 10_000_000)
    running.table.clean(NOW + 1 + IDLE_LIFETIME)
    assert running.entry is not None
    running.data("next", make_raw(0x0C, unhex(GOOD["link_id"]), 0, b"x"), NOW + 600)
    running.table.clean(NOW + 600 + IDLE_LIFETIME)
    assert running.entry is not None
    running.table.clean(NOW + 601 + IDLE_LIFETIME)
    assert running.entry is None
    gone = Transit(GOOD)
    gone.give("next", PROOF)
    gone.table.leave(gone.ports["previous"])
    assert gone.entry is None


def test_a_flood_of_requests_pushes_out_no_running_link() -> None:
    transit = Transit(GOOD)
    transit.give("next", PROOF)
    raw = unhex(GOOD["request_in"])
    for n in range(UNPROVED_LIMIT + 100):
        other = raw[:35] + n.to_bytes(32, "big") + raw[67:]
        assert isinstance(transit.table.enter(port("x"), parsed(other), other, transit.path, NOW + 2), bytes)
    assert len(transit.table.unproved) == UNPROVED_LIMIT and transit.entry.validated


def test_data_of_odd_sizes_is_passed_on_as_it_is() -> None:
    a, b = port("a"), port("b", 1064, False)
    for size in (60, 64, 65, 66, 68, 100):
        assert clamp_request(b"\xff" * size, a, b) == b"\xff" * size
