"""Every scenario of the transport vectors: what a transport node sends, counts and remembers, step by step."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from rnsfast.crypto.identity import Identity
from rnsfast.engine.destination import Destination, Direction
from rnsfast.engine.engine import Engine
from rnsfast.engine.port import Local, Mode, Policy, Port
from rnsfast.engine.transport.blackhole import Ban
from rnsfast.interfaces.common import MODES
from rnsfast.wire.announce import parse_announce, signed_data
from rnsfast.wire.packet import SINGLE, Packet, parse_packet
from tests.engine.support import NOW
from tests.vectors_support import Case, by_name, unhex, vectors
from tests.virtualnet import Recorder

FILE = vectors("transport")
START = FILE["clock_start"]
STEP = 0.25  # seconds

#: Drops that the reference counts as violations of the protocol, and as hits of its packet filter.
FILTER_HITS = {"filter.duplicate", "filter.foreign_transport", "filter.broadcast_too_far", "filter.broadcast_announce"}


#: Step of a scenario to what is different here, on purpose: None, nothing is sent; a number, the step is compared with
#: that one, since we are earlier; else what the state is.
DIFFERENT: dict[str, dict[int, Any]] = {
    "forward_data": {12: None, 13: "fewer"},  # with 128 hops, which every receiver refuses
    "announce_bandwidth_cap": {4: 5},
    # An old announce, replayed, does not bring back old app data (protocol 02, section 2.4).
    "replayed_older_announce": {3: "newest"},
    # A proof from the wrong interface does not use up the way back of the right one (trap T7).
    "proof_return": {9: "passed"},
}


class World:
    """One engine, its interfaces by name, and the clock."""

    def __init__(self, case: Case) -> None:
        self.now = NOW
        self.recorder = Recorder()
        identity = Identity.from_private(unhex(FILE["own_transport_private_key"]))
        self.engine = Engine(
            self.recorder,  # type: ignore[arg-type]
            NOW,
            unix_offset=START - NOW,
            entropy=lambda size: b"\x80" + bytes(size - 1),  # jitter of half the window
            transport_identity=identity,
            transport=case["transport_enabled"],
            shared_instance=any(i.get("local_client") for i in case["interfaces"]),
            behind_instance=case["connected_to_shared_instance"],
            local_hops_delta=case["local_hops_delta"],
        )
        self.locals: dict[bytes, Destination] = {}
        self.ports: dict[str, Port] = {}
        for interface in case["interfaces"]:
            self.add(interface)
        for local in case["local_destinations"]:
            owner = Identity.from_private(unhex(local["private_key"]))
            destination = Destination(owner, Direction.IN, SINGLE, local["app_name"], *local["aspects"])
            assert destination.hash.hex() == local["hash"]
            if local["default_app_data"] is not None:
                destination.app_data = unhex(local["default_app_data"])
            self.locals[destination.hash] = destination
            if not case["connected_to_shared_instance"]:  # it registers in a step
                self.engine.register(destination)

    def add(self, interface: dict[str, Any]) -> None:
        target, grace, penalty = interface.get("announce_rate") or (None, None, None)
        port = Port(
            f"Stub[{interface['name']}]",
            mode=MODES[interface.get("mode", "full")],
            bitrate=interface.get("bitrate", 10_000_000),
            hw_mtu=interface.get("hw_mtu") or 1064,
            upgradable=interface.get("mtu_signalling", True),
            gravity=interface.get("gravity", 0),
            policy=Policy(
                announce_rate_target=target,
                announce_rate_grace=grace,
                announce_rate_penalty=penalty,
                ingress_control=interface.get("ingress_control", False),
                recursive_prs=interface.get("recursive_prs", False),
            ),
            local=(
                Local.INSTANCE if self.engine.membership is not None
                else Local.CLIENT if interface.get("local_client")
                else Local.NO
            ),
        )  # fmt: skip
        port.online = True
        self.ports[interface["name"]] = port
        self.engine.attach(port, self.now - interface.get("age_s", 86400))

    def sent(self) -> list[tuple[str, bytes]]:
        return [(name, raw) for name, port in self.ports.items() for raw in port.take()]

    def counted(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for port in self.ports.values():
            for drop, count in port.drops.items():
                total["filter_hit" if drop.value in FILTER_HITS else drop.value] += count
        return total

    def name_of(self, port: Port | None) -> str | None:
        return next((name for name, p in self.ports.items() if p is port), None)

    # the steps

    def rx(self, step: dict[str, Any]) -> None:
        self.engine.receive(self.ports[step["if"]], [unhex(step["raw"])], self.now)

    def advance(self, step: dict[str, Any]) -> None:
        end = self.now + step["seconds"]
        while self.now < end:
            self.now = min(end, self.now + STEP)
            self.engine.run_timers(self.now)
            while self.engine.inbound:
                items = self.engine.inbound.take()
                self.engine.verified(items, self.engine.verify(items), self.now)

    def originate(self, step: dict[str, Any]) -> None:
        raw = unhex(step["raw"])
        if step.get("note") == "attached interface":
            for name in step["tx"][0]["ifs"]:
                self.ports[name].send(raw)
        elif raw[0] & 3 == 1:
            for port in self.ports.values():
                if port.mode is not Mode.ACCESS_POINT:
                    port.send(raw)
        else:
            self.engine._route(raw, raw[2:18], self.now)

    def request_path(self, step: dict[str, Any]) -> None:
        on = self.ports[step["on_interface"]] if step.get("on_interface") else None
        self.engine.announcing.request_path(unhex(step["destination"]), self.now, on=on)

    def register_destination(self, step: dict[str, Any]) -> None:
        self.engine.register(self.locals[unhex(step["hash"])], self.now)
        self.advance({"seconds": 0.25})

    def blackhole_identity(self, step: dict[str, Any]) -> None:
        offset = step.get("until_offset")
        until = None if offset is None else self.now + self.engine.unix_offset + offset
        self.engine.ban(unhex(step["identity"]), Ban(self.engine.transport_id, until), self.now)

    def remove_interface(self, step: dict[str, Any]) -> None:
        self.engine.detach(self.ports.pop(step["if"]), self.now)

    def add_interface(self, step: dict[str, Any]) -> None:
        self.add(step["interface"])

    def state(self, step: dict[str, Any]) -> None:
        for key, expected in step.items():
            if key not in ("op", "note"):
                found = getattr(self, f"state_{key}")()
                assert found == (expected if isinstance(expected, dict) else sorted(expected, key=repr)), key

    def state_paths(self) -> list[Any]:
        paths = self.engine.paths.paths.items()
        rows = [[d.hex(), p.hops, p.next_hop.hex(), self.name_of(p.port), p.unresponsive] for d, p in paths]
        return sorted(rows, key=repr)

    def state_links(self) -> list[Any]:
        links = self.engine.transport.links  # type: ignore[union-attr]
        rows = [
            [i.hex(), e.next_hop.hex(), self.name_of(e.next_port), e.remaining, self.name_of(e.previous_port), e.taken,
             e.destination.hex(), e.validated]
            for table in (links.unproved, links.proved) for i, e in table.items()
        ]  # fmt: skip
        return sorted(rows, key=repr)

    def state_reverse(self) -> list[Any]:
        items = self.engine.transport.relay.reverse.items()  # type: ignore[union-attr]
        return sorted([[k.hex(), self.name_of(a), self.name_of(b)] for k, (a, b) in items], key=repr)

    def state_announces(self) -> list[Any]:
        table = self.engine.transport.announces  # type: ignore[union-attr]
        rows = [
            [e.destination.hex(), e.retries, e.hops, e.local_rebroadcasts, e.is_response, self.name_of(asker)]
            for e in {**table.entries, **table.answers}.values()
            for asker in e.askers or [None]
        ]
        return sorted(rows, key=repr)

    def state_held(self) -> dict[str, Any]:
        intakes = self.engine.transport.intakes  # type: ignore[union-attr]
        return {self.name_of(p): sorted(d.hex() for d in i.held) for p, i in intakes.items() if i.held}  # type: ignore[misc]

    def state_waiting(self) -> list[Any]:
        waiting = self.engine.transport.searches.waiting.items()  # type: ignore[union-attr]
        return sorted([[d.hex(), [self.name_of(p) for p in w.ports], w.engaged] for d, w in waiting], key=repr)

    def state_tunnels(self) -> list[Any]:
        tunnels = self.engine.transport.tunnels.tunnels.values()  # type: ignore[union-attr]
        return sorted([[t.id.hex(), self.name_of(t.port), [d.hex() for d in t.paths]] for t in tunnels], key=repr)

    def state_rates(self) -> list[Any]:
        rates = self.engine.transport.rates.entries.items()  # type: ignore[union-attr]
        rows = [
            [
                d.hex(),
                r.violations,
                round(r.last - START, 3),
                round(r.blocked_until - START, 3) if r.blocked_until else 0,
            ]
            for d, r in rates
        ]
        return sorted(rows, key=repr)

    def state_known(self) -> list[Any]:
        rows = [
            [d.hex(), None if k.app_data is None else k.app_data.hex()] for d, k in self.engine.known.entries.items()
        ]
        return sorted(rows, key=repr)

    def state_ratchets(self) -> list[Any]:
        return sorted([[d.hex(), r.hex()] for d, (r, _) in self.engine.known.ratchets.items()], key=repr)


def check_sent(world: World, expected: list[dict[str, Any]]) -> None:
    left = world.sent()
    for entry in expected:
        wanted = unhex(entry["raw"])
        for name in entry["ifs"]:
            match = next((pair for pair in left if pair[0] == name and same(pair[1], wanted, entry.get("match"))), None)
            assert match is not None, f"{wanted.hex()} did not leave on {name}; left: {[(n, r.hex()) for n, r in left]}"
            left.remove(match)
    assert not left, [(name, raw.hex()) for name, raw in left]


def same(raw: bytes, wanted: bytes, how: str | None) -> bool:
    if how is None:
        return raw == wanted
    if how == "path_request_fields":
        return len(raw) == len(wanted) and raw[:-16] == wanted[:-16]
    ours, theirs = parse_packet(raw), parse_packet(wanted)
    assert isinstance(ours, Packet) and isinstance(theirs, Packet)
    if (ours.flags, ours.hops, ours.destination, ours.context) != (
        theirs.flags, theirs.hops, theirs.destination, theirs.context,
    ):  # fmt: skip
        return False
    a, b = parse_announce(ours), parse_announce(theirs)
    assert not isinstance(a, Packet)
    valid = Identity.from_public(a.public_key).verify(a.signature, signed_data(a))  # type: ignore[union-attr]
    return valid and (a.public_key, a.name_hash, a.app_data) == (b.public_key, b.name_hash, b.app_data)  # type: ignore[union-attr]


@pytest.mark.parametrize("case", FILE["scenarios"], ids=by_name)
def test_scenario(case: Case) -> None:
    world = World(case)
    different = DIFFERENT.get(case["name"], {})
    due: list[dict[str, Any]] = []  # what earlier steps were to send, for a later one
    for number, step in enumerate(case["steps"]):
        before = world.counted()
        change = different.get(number, step)
        if change == "newest":
            assert step["op"] == "state" and world.state_known() != step["known"]
            continue
        if change == "fewer":
            found = world.state_reverse()
            assert len(found) == len(step["reverse"]) - 1 and all(row in step["reverse"] for row in found)
            continue
        getattr(world, step["op"])(step)
        if change == "passed":
            assert [name for name, _ in world.sent()] == ["A"] and not step["tx"]
            continue
        due += step.get("tx", []) if change is not None else []
        if isinstance(change, int):
            continue
        try:
            check_sent(world, due)
        except AssertionError as error:
            raise AssertionError(f"step {number} {step['op']} {step.get('note', '')}: {error}") from error
        due = []
        hits = (world.counted() - before)["filter_hit"]
        if step["op"] == "rx":
            assert hits == step.get("counted", {}).get("filter_hit", 0), f"step {number}: {world.counted() - before}"
