"""The node's own destinations: announced at their time, answering what they are for."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rnsfast import Identity, Node, StorageError
from rnsfast.engine.events import AnnounceHeard
from rnsfast.node.config import NodeConfig, parse_config
from rnsfast.node.management import network_identity
from tests.loopback import PATIENCE, Clock, Pair


@contextmanager
def pair_with(clock: Clock, **options: Any) -> Iterator[Pair]:
    """`a` has these options, `b` none."""
    pair = Pair()
    pair.a.config = NodeConfig(**options)
    pair.start()
    try:
        yield pair
    finally:
        pair.stop()


def heard_at(pair: Pair) -> queue.SimpleQueue[AnnounceHeard]:
    heard: queue.SimpleQueue[AnnounceHeard] = queue.SimpleQueue()
    pair.b.on_announce(heard.put)
    return heard


def errands_done(node: Node) -> None:
    """Return when the errands that were due have been made."""
    assert node._management is not None
    for errands in node._management._errands:
        done = threading.Event()
        errands.run(done.set)
        assert done.wait(PATIENCE)


def test_management_destinations_are_announced_after_a_quarter_of_a_minute_and_every_two_hours(clock: Clock) -> None:
    with pair_with(clock, enable_transport=True, respond_to_probes=True) as pair:
        heard = heard_at(pair)
        probe = pair.a._management and pair.a._management.probe
        clock.advance(14.9, pair.a, pair.b)
        assert heard.empty()
        clock.advance(0.2, pair.a)
        assert heard.get(timeout=PATIENCE).destination == probe
        clock.advance(7199.0, pair.a, pair.b)
        assert heard.empty()
        clock.advance(1.5, pair.a)
        assert heard.get(timeout=PATIENCE).destination == probe


def test_announces_that_reached_nobody_are_made_up_for_when_a_neighbour_comes(clock: Clock) -> None:
    with pair_with(clock, enable_transport=True, respond_to_probes=True) as pair:
        heard = heard_at(pair)
        pair.end_b.close()
        clock.advance(15.1, pair.a)
        errands_done(pair.a)
        pair.end_b.start(pair.b._reactor)
        assert pair.a._management is not None
        assert heard.get(timeout=PATIENCE).destination == pair.a._management.probe


def test_probes_are_proved_and_links_to_the_responder_refused(clock: Clock) -> None:
    with pair_with(clock, enable_transport=True, respond_to_probes=True) as pair:
        assert pair.a._management is not None and pair.a._management.probe is not None
        pair.b.request_path(pair.a._management.probe, PATIENCE)
        receipt = pair.b.outbox(pair.a._management.probe, "rnstransport", "probe").send(b"anything")
        assert receipt is not None and receipt.wait(PATIENCE)
        assert not pair.a._management.destinations[0].accepts_links


def test_only_a_transport_node_answers_probes(clock: Clock) -> None:
    with pair_with(clock, respond_to_probes=True) as pair:
        assert pair.a._management is not None and pair.a._management.probe is None
    loaded = parse_config(b"[reticulum]\nrespond_to_probes = yes\n")
    assert loaded.warnings == ["config:2: [reticulum]: respond_to_probes: has no effect without enable_transport"]


def test_a_node_of_a_network_announces_the_networks_destinations(clock: Clock, tmp_path: Path) -> None:
    path = tmp_path / "network"
    with pair_with(clock, network_identity=path) as pair:
        heard = heard_at(pair)
        clock.advance(15.1, pair.a)
        events = [heard.get(timeout=PATIENCE) for _ in range(2)]
        assert {event.identity.hash for event in events} == {Identity.load(path).hash}
        own = Identity.load(path).hash.hex()
        assert pair.a._management is not None
        names = [destination.name for destination in pair.a._management.destinations]
        assert names == ["rnstransport.network", f"rnstransport.network.instance.{own}"]


def test_a_network_identity_is_made_once_and_a_damaged_one_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "network"
    made = network_identity(path)
    assert network_identity(path) == made and path.stat().st_mode & 0o777 == 0o600
    path.write_bytes(b"short")
    with pytest.raises(StorageError, match="64 bytes"):
        network_identity(path)
