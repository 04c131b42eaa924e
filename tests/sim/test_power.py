"""The power fails: field case F11 in virtual time.

Files and their damage are tested in `tests/node`. Here: what a network makes of a relay that comes back with what its
disk still holds, and of an owner that has lost its ratchets.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from rnsfast.engine.destination import RatchetRing
from rnsfast.engine.engine import Engine
from rnsfast.engine.receipts import Status
from rnsfast.node.storage import Storage
from rnsfast.node.transportstore import CACHE, HASHES, PATHS, TUNNELS, TransportStore
from rnsfast.wire.drop import Drop
from tests.sim.checks import loops
from tests.sim.network import Network
from tests.sim.test_links import far_end, link_between, stream
from tests.virtualnet import UNIX, SimNode

DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "all but one": lambda data: data[:-1],
    "zeros": lambda data: bytes(len(data)),
    "noise": lambda data: random.Random(5).randbytes(len(data)),
}


def save(engine: Engine, folder: Path) -> None:
    with Storage(folder) as storage:
        assert TransportStore(storage, threading.Lock()).save(engine, hashes=True)


def load(net: Network, folder: Path) -> Callable[[Engine], None]:
    def prepare(engine: Engine) -> None:
        with Storage(folder) as storage:
            TransportStore(storage, threading.Lock()).load(engine, net.now + UNIX)

    return prepare


def city(seed: int = 90) -> tuple[Network, SimNode, SimNode, SimNode]:
    """left - n0 - n1 - n2 - right: the network, left, n1, right."""
    net = Network(seed)
    left, relays, right = net.node("left"), net.relays(3), net.node("right")
    net.line([left, *relays, right])
    return net, left, relays[1], right


def test_f11_a_relay_that_comes_back_carries_packets_before_it_has_heard_anything(tmp_path: Path) -> None:
    net, left, middle, right = city()
    place = net.announce(right)
    net.settle()
    save(middle.engine, tmp_path)
    net.restart(middle, load(net, tmp_path), noticed=False)
    assert middle.engine.paths.paths[place.hash].hops == 2 and middle.engine.known.entries == {}
    assert net.delivers(left, place)


def test_f11_links_over_a_relay_that_came_back_need_no_announce(tmp_path: Path) -> None:
    """The relay checks link proofs with the destination's key: that it must have kept, too."""
    net, left, middle, right = city(91)
    place = net.announce(right)
    net.settle()
    save(middle.engine, tmp_path)
    known = dict(middle.engine.known.entries)  # `known_destinations` is a file of its own

    def prepare(engine: Engine) -> None:
        load(net, tmp_path)(engine)
        engine.known.entries.update(known)

    net.restart(middle, prepare, noticed=False)
    stream(net, link_between(net, left, place, right), far_end(right), 20_000)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", [PATHS, TUNNELS, HASHES, CACHE])
def test_f11_whatever_is_damaged_the_next_announce_or_question_brings_it_back(
    name: str, damage: str, tmp_path: Path
) -> None:
    net, left, middle, right = city(92)
    places = {node: net.announce(node) for node in net.nodes}
    net.settle()
    save(middle.engine, tmp_path)
    target = tmp_path / "storage" / name
    for path in target.iterdir() if target.is_dir() else [target]:
        path.write_bytes(DAMAGES[damage](path.read_bytes()))
    net.restart(middle, load(net, tmp_path))
    assert net.delivers(left, places[right], 1.0) or name in (PATHS, CACHE), "what other files hold is intact"
    assert net.ask(middle, places[right]) and net.ask(middle, places[left])
    assert net.delivers(left, places[right]) and net.delivers(right, places[left])
    for node, place in places.items():
        net.announce(node, destination=place)
    net.settle()
    assert not list(loops(net, places.values()))
    assert all(net.way(source, place)[-1] is owner for source in net.nodes for owner, place in places.items())
    save(middle.engine, tmp_path)


def test_f11_every_relay_loses_power_at_once(tmp_path: Path) -> None:
    """A whole grid restarts from its disks, in any order: packets go at once where they went before."""
    net = Network(seed=93)
    nodes = net.relays(16)
    net.grid(nodes, 4)
    places = {node: net.announce(node) for node in nodes[::5]}
    net.settle()
    for node in nodes:
        save(node.engine, tmp_path / node.name)
    net.run(60.0)
    ways = {(s, o): net.way(s, place) for s in nodes for o, place in places.items()}
    order = list(nodes)
    net.random.shuffle(order)
    for node in order:
        net.restart(node, load(net, tmp_path / node.name))
    assert all(net.way(s, places[o]) == way for (s, o), way in ways.items())
    for owner, place in places.items():
        for source in net.random.sample(nodes, 4):
            if source is not owner:
                assert net.delivers(source, place)


def test_f11_messages_to_lost_ratchets_are_counted_and_those_after_the_next_announce_arrive() -> None:
    net, left, _, right = city(94)
    place = right.inbound("ratcheted")
    place.ratchets, place.enforce_ratchets = RatchetRing(), True
    net.announce(right, destination=place)
    net.settle()
    assert net.delivers(left, place)
    place.ratchets = RatchetRing()  # its file is lost, and so are the keys
    receipt = left.engine.send_packet(left.outbound(place), b"sealed to what is lost", net.now)
    net.run(60.0)
    assert receipt is not None and receipt.status is Status.FAILED
    assert sum(port.drops[Drop.DECRYPTION] for port in right.engine.ports) == 1
    net.announce(right, destination=place)
    net.settle()
    assert net.delivers(left, place)
    assert len(right.recorder.named("packet_arrived")) == 2


def test_f11_an_owner_that_comes_back_is_reached_again_however_its_clock_went(tmp_path: Path) -> None:
    """Its emission times have gone back by a minute: until they pass the newest, peers keep the old path, which is good
    as long as the owner has not moved."""
    net, left, _, right = city(95)
    place = net.announce(right)
    net.settle()
    place.last_emission = 0
    right.engine.unix_offset -= 60.0
    net.announce(right, destination=place)
    net.settle()
    assert net.delivers(left, place)
    net.run(70.0)
    net.announce(right, destination=place)
    taken = net.settle()
    assert taken > 0 and left.engine.paths.paths[place.hash].newest == place.last_emission
