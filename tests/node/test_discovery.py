"""Discovery on nodes that are joined in memory: announcing, listening, remembering."""

from __future__ import annotations

import queue
import stat
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rnsfast import Identity, Node
from rnsfast.crypto.stamp import find_stamp, work_block
from rnsfast.engine.events import AnnounceHeard
from rnsfast.engine.transport.blackhole import Ban
from rnsfast.interfaces.common import CommonConfig
from rnsfast.interfaces.discovery import DiscoveryOptions, Published
from rnsfast.node.config import NodeConfig
from rnsfast.node.discoveryannounce import RETRY, Announcer
from rnsfast.node.discoverylisten import REMEMBERED, WAITING, DiscoveryListener
from rnsfast.node.discoverystore import LIMIT, DiscoveryStore, RecordStatus
from rnsfast.wire.discovery import BACKBONE, TCP_CLIENT, Offer, build_info, info_hash, parse_info, split_payload
from rnsfast.wire.discoveryrecord import Record, build_record
from rnsfast.wire.drop import Drop
from tests.loopback import PATIENCE, Clock, Pair
from tests.node.errands import FakeWork
from tests.vectors_support import vectors

DAY = 86400.0
OFFER = Offer(kind=BACKBONE, transport=True, transport_id=bytes(16), name="n", reachable_on="h.example", port=4242)


def app_data(offer: Offer = OFFER, cost: int = 4, network: Identity | None = None) -> bytes:
    packed = build_info(offer)
    stamp = find_stamp(work_block(info_hash(packed)), cost)
    assert stamp is not None
    return b"\x00" + packed + stamp if network is None else b"\x02" + network.encrypt(packed + stamp)


def event(data: bytes | None, identity: Identity | None = None) -> AnnounceHeard:
    who = identity or Identity()
    return AnnounceHeard(bytes(16), bytes(10), who, data, bytes(32), 2, None, False)


class Section:
    """An interface as the announcer sees it."""

    def __init__(self, name: str) -> None:
        self.name = name


def discoverable(section: str = "x", kind: str = "TCPServerInterface", **options: Any) -> Published:
    values = {"stamp_cost": 2, "reachable_on": "h.example", **options}
    return Published(Section(section), kind, 4242 if "Server" in kind else None, DiscoveryOptions(**values))


class Said:
    """An announcer, and what it has announced when."""

    def __init__(self, *interfaces: Published, network: Identity | None = None) -> None:
        self.work, self.interfaces, self.up = FakeWork(), list(interfaces), True
        self.sent: list[tuple[float, bytes]] = []
        self.announcer = Announcer(
            self.work, lambda: self.interfaces, self._announce,
            transport_id=bytes(16), transport=True, network=network, version="0",
        )  # fmt: skip
        self.announcer.start()

    def _announce(self, data: bytes) -> bool:
        if self.up:
            self.sent.append((self.work.now(), data))
        return self.up

    def offers(self) -> list[Any]:
        return [parse_info(split_payload(data[1:])[0]) for _, data in self.sent]


# ------------------------------------------------------------------ announcing


def test_interfaces_are_announced_one_a_minute_and_again_after_their_interval() -> None:
    said = Said(discoverable("a", name="a"), discoverable("b", name="b", announce_interval=300.0))
    said.work.advance(59.9)
    assert not said.sent
    said.work.advance(1000.0)
    start = said.work.began
    assert [round(at - start) for at, _ in said.sent] == [60, 120, 420, 720, 1020]
    assert [offer.name for offer in said.offers()] == ["a", "b", "b", "b", "b"]
    said.work.advance(6 * 3600.0)
    assert [offer.name for offer in said.offers()].count("a") == 2


def test_nothing_is_planned_while_there_is_nothing_to_announce() -> None:
    said = Said()
    said.work.advance(1000.0)
    assert not said.work.planned
    said.interfaces.append(discoverable())
    said.announcer.wake()
    said.work.advance(0.0)
    assert len(said.sent) == 1


def test_an_announce_that_nobody_could_hear_is_made_when_an_interface_comes_up() -> None:
    said = Said(discoverable())
    said.up = False
    said.work.advance(7200.0)
    assert not said.sent and said.announcer.is_waiting and not said.work.planned
    said.up = True
    said.announcer.wake()
    said.work.advance(60.0)
    assert len(said.sent) == 1 and not said.announcer.is_waiting


def test_a_stamp_is_searched_once_for_the_same_content() -> None:
    said = Said(discoverable(announce_interval=300.0, stamp_cost=8))
    said.work.advance(1000.0)
    assert len({data for _, data in said.sent}) == 1 and len(said.sent) > 2


def test_an_encrypted_announce_is_for_the_network_only() -> None:
    network = Identity()
    said = Said(discoverable(encrypt=True), network=network)
    said.work.advance(61.0)
    data = said.sent[0][1]
    assert data[0] == 0x02
    opened = network.decrypt(data[1:])
    assert opened is not None and isinstance(parse_info(split_payload(opened[0])[0]), Offer)
    without = Said(discoverable(encrypt=True))
    without.work.advance(120.0)
    assert not without.sent


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"reachable_on": None}, "reachable_on is not set"),
        ({"reachable_on": "no host"}, "neither an address nor a host name"),
        ({"kind": "KISSInterface"}, "frequency and bandwidth and modulation"),
        ({"location_program": "false"}, "location_cmd"),
    ],
)
def test_what_cannot_be_announced_is_said_once_and_tried_again(
    options: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    said = Said(discoverable(**options))
    said.work.advance(60.0 + 3 * RETRY)
    assert not said.sent
    assert sum(why in message for message in caplog.messages) == 1
    said.interfaces[0] = Published(said.interfaces[0].interface, "TCPServerInterface", 1, DiscoveryOptions(
        stamp_cost=0, reachable_on="h.example"))  # fmt: skip
    said.work.advance(RETRY)
    assert len(said.sent) == 1


def program(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_programs_say_where_an_interface_is(tmp_path: Path) -> None:
    where, place = program(tmp_path / "host", "echo node.example"), program(tmp_path / "place", "echo 1.5, -2, 3")
    said = Said(discoverable(reachable_on=where, location_program=place, latitude=9.0))
    said.work.advance(61.0)
    offer = said.offers()[0]
    assert (offer.reachable_on, offer.latitude, offer.longitude, offer.height) == ("node.example", 1.5, -2.0, 3.0)


def test_a_program_that_fails_or_hangs_ends_with_the_node(tmp_path: Path) -> None:
    node = Node.from_interfaces([]).start()
    try:
        assert node._management is not None
        errands = node._management.errands()
        for text in ("exit 3", "true"):
            with pytest.raises(OSError):
                errands.run_program([program(tmp_path / "p", text)])
        outcome: queue.SimpleQueue[str] = queue.SimpleQueue()

        began = threading.Event()

        def ask() -> None:
            began.set()
            try:
                outcome.put(errands.run_program([program(tmp_path / "slow", "echo on >&2; exec sleep 60")]))
            except OSError as error:
                outcome.put(str(error))

        errands.run(ask)
        assert began.wait(PATIENCE)
    finally:
        node.stop()
    assert "status -9" in (why := outcome.get(timeout=PATIENCE)) or "stopping" in why


# ------------------------------------------------------------------ listening


class Heard:
    """A listener, the records it made and the drops it counted."""

    def __init__(self, **options: Any) -> None:
        self.work = FakeWork()
        self.records: list[Record] = []
        self.drops: list[Drop] = []
        self.listener = DiscoveryListener(
            self.work, self.records.append, self.drops.append, **{"required": 4, **options}
        )

    def hear(self, data: bytes | None, identity: Identity | None = None) -> None:
        self.listener.heard(event(data, identity))
        self.work.advance(0.0)


def test_a_good_announce_becomes_a_record() -> None:
    heard, who = Heard(), Identity()
    heard.hear(app_data(), who)
    (record,) = heard.records
    assert (record.offer, record.network_id, record.hops) == (OFFER, who.hash, 2)
    assert record.value >= 4 and not heard.drops
    heard.hear(app_data(replace(OFFER, kind=TCP_CLIENT)))
    assert len(heard.records) == 1  # nobody can connect to one that connects


def test_bad_announces_are_counted_by_why() -> None:
    heard = Heard(required=8)
    good, network = app_data(cost=8), Identity()
    heard.hear(None)
    heard.hear(good[:33])
    heard.hear(good[:-1] + bytes((good[-1] ^ 1,)))
    heard.hear(app_data(cost=8, network=network))
    heard.hear(app_data(cost=8)[:40])
    assert heard.drops[:2] == [Drop.DISCOVERY_UNREADABLE] * 2
    assert heard.drops[2:4] == [Drop.DISCOVERY_STAMP, Drop.DISCOVERY_SEALED] and not heard.records
    again = Heard(network=network)
    again.hear(app_data(network=network))
    assert len(again.records) == 1


def test_only_allowed_sources_count() -> None:
    friend = Identity()
    heard = Heard(sources=[friend.hash])
    heard.hear(app_data())
    heard.hear(app_data(), friend)
    assert heard.drops == [Drop.DISCOVERY_SOURCE] and len(heard.records) == 1


def test_the_same_bytes_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    heard, looks = Heard(), []
    examine = heard.listener._examine
    monkeypatch.setattr(heard.listener, "_examine", lambda data: looks.append(data) or examine(data), raising=False)
    good, bad = app_data(), app_data(replace(OFFER, name="m"), cost=0)[:-1] + b"\x00"
    for data in (good, good, b"\x00" + bytes(60), b"\x00" + bytes(60), bad):
        heard.hear(data)
    assert len(looks) == 3 and len(heard.records) >= 2 and Drop.DISCOVERY_REPEATED in heard.drops


def test_a_copy_with_the_wrong_flag_does_not_spoil_the_good_one() -> None:
    heard, good = Heard(), app_data()
    heard.hear(b"\x02" + good[1:])
    heard.hear(good)
    assert len(heard.records) == 1


def test_a_flood_is_dropped_and_what_is_remembered_is_bounded() -> None:
    heard = Heard()
    for n in range(100):
        heard.listener.heard(event(b"\x00" + n.to_bytes(4, "big") + bytes(60)))
    assert heard.drops.count(Drop.DISCOVERY_BUSY) == 100 - WAITING - 1
    heard.work.advance(0.0)
    for n in range(REMEMBERED + 10):
        heard.hear(b"\x00" + n.to_bytes(4, "big") + bytes(61))
    assert len(heard.listener._bad) == REMEMBERED


# ------------------------------------------------------------------ remembering


def record(at: float = 0.0, name: str = "n", value: int = 16, network: bytes = bytes(16)) -> Record:
    return Record(
        offer=replace(OFFER, name=name), stamp=bytes(32), value=value, network_id=network, hops=1,
        received=at, discovered=at, last_heard=at,
    )  # fmt: skip


def everybody(identity: bytes) -> bool:
    return True


def test_records_age_and_go() -> None:
    store = DiscoveryStore(None, everybody)
    store.heard(record(0.0))
    for age, status in ((1.0, RecordStatus.AVAILABLE), (DAY, RecordStatus.UNKNOWN), (3 * DAY, RecordStatus.STALE)):
        assert [one.status for one in store.all(age)] == [status]
    assert store.all(7 * DAY) == []


def test_records_are_sorted_by_status_work_and_time() -> None:
    store = DiscoveryStore(None, everybody)
    for at, name, value in ((0.0, "old", 30), (2 * DAY, "less", 16), (2 * DAY, "more", 20), (2 * DAY + 5, "late", 16)):
        store.heard(record(at, name, value))
    assert [one.record.name for one in store.all(2 * DAY + 10)] == ["more", "late", "less", "old"]


def test_a_record_heard_again_keeps_when_it_was_discovered(tmp_path: Path) -> None:
    store = DiscoveryStore(tmp_path / "d", everybody)
    store.heard(record(10.0))
    again = store.heard(record(20.0))
    assert (again.discovered, again.last_heard, again.heard_count) == (10.0, 20.0, 1)
    reloaded = DiscoveryStore(tmp_path / "d", everybody)
    reloaded.load(21.0)
    assert [one.record for one in reloaded.all(21.0)] == [again]


def test_the_references_records_are_read_and_written_alike(tmp_path: Path) -> None:
    stored = vectors("node", "discovery", "stored")
    path = tmp_path / Path(stored["path"]).name
    path.write_bytes(bytes.fromhex(stored["after_first"]))
    store = DiscoveryStore(tmp_path, everybody)
    store.load(1_790_000_001.0)
    (found,) = store.all(1_790_000_001.0)
    store.heard(replace(found.record, last_heard=found.record.last_heard))
    assert path.read_bytes() == bytes.fromhex(stored["after_second"])


def test_files_that_are_no_records_of_their_name_are_removed(tmp_path: Path) -> None:
    good = record(100.0)
    (tmp_path / good.hash.hex()).write_bytes(build_record(good))
    (tmp_path / ("0" * 64)).write_bytes(build_record(good))
    (tmp_path / "rubbish").write_bytes(b"\xc1")
    old = record(-8 * DAY, "old")
    (tmp_path / old.hash.hex()).write_bytes(build_record(old))
    DiscoveryStore(tmp_path, everybody).load(101.0)
    assert [path.name for path in tmp_path.iterdir()] == [good.hash.hex()]


def test_records_of_sources_that_are_not_wanted_any_more_go(tmp_path: Path) -> None:
    unwanted: set[bytes] = set()
    store = DiscoveryStore(tmp_path, lambda identity: identity not in unwanted)
    store.heard(record(0.0, network=b"a" * 16))
    unwanted.add(b"a" * 16)
    assert store.all(1.0) == [] and not list(tmp_path.iterdir())


def test_records_are_bounded() -> None:
    store = DiscoveryStore(None, everybody)
    for n in range(LIMIT + 3):
        store.heard(record(float(n), f"n{n}"))
    assert len(store.all(float(LIMIT))) == LIMIT
    assert min(one.record.last_heard for one in store.all(float(LIMIT))) == 3.0


# ------------------------------------------------------------------ in a node


def test_a_node_hears_of_the_interfaces_of_another(clock: Clock) -> None:
    pair = Pair()
    pair.a.config = NodeConfig(discover_interfaces=True, required_discovery_value=2)
    pair.b.config = NodeConfig(enable_transport=True)
    with_section: Any = pair.end_b  # an interface of `b` that says it can be connected to
    with_section.kind = "TCPServerInterface"
    options = DiscoveryOptions(stamp_cost=2, name="a node", reachable_on="h.example")
    common = CommonConfig(name="b", discovery=options)
    with_section.settings = type("Settings", (), {"common": common, "port": 4242, "host": None})()
    pair.start()
    try:
        heard: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        pair.a.on_interface_discovered(heard.put)
        clock.advance(61.0, pair.b)
        found = heard.get(timeout=PATIENCE)
        assert (found["name"], found["reachable_on"], found["port"]) == ("a node", "h.example", 4242)
        assert found["status"] == "available" and found["impl_name"] == "rnsfast"
        assert pair.a.discovered_interfaces() == [found]
        pair.a._engine.ban(bytes.fromhex(found["network_id"]), Ban(bytes(16)), pair.a._reactor.now())
        assert pair.a.discovered_interfaces() == []
        assert pair.b.discovered_interfaces() == []
    finally:
        pair.stop()
