"""What a node tells of itself, to whom: the reference's vectors, and two nodes joined in memory."""

from __future__ import annotations

import logging
from typing import Any

import msgpack
import pytest

from rnsfast import Identity, Link
from rnsfast.engine.known import Path as KnownPath
from rnsfast.engine.port import Port
from rnsfast.engine.requests import RequestStatus, ask
from rnsfast.engine.transport.rates import Rate
from rnsfast.interfaces.backbone import BackboneConfig, BackboneInterface
from rnsfast.interfaces.common import CommonConfig
from rnsfast.node.config import NodeConfig
from rnsfast.node.managementremote import RemoteManagement, answer_path, answer_status
from rnsfast.node.managementstats import Pace, Statistics, path_table, rate_table
from rnsfast.wire.drop import Drop
from rnsfast.wire.requests import Request, parse_request, path_hash
from tests.loopback import PATIENCE, Clock, Pair, settle
from tests.node.test_management import errands_done, pair_with
from tests.vectors_support import Case, vectors

CASES = [case for case in vectors("node", "remote_management", "cases") if case["path"] != "/list"]
ASKED = [case for case in CASES if "request_payload" in case]
FIXED = 1_790_000_000.25


def request_of(case: Case) -> Request:
    request = parse_request(bytes.fromhex(case["request_payload"]))
    assert isinstance(request, Request) and request.path_hash == path_hash(case["path"])
    return request


def response_of(case: Case) -> Any:
    return msgpack.unpackb(bytes.fromhex(case["response_payload"]))[1] if case["response_payload"] else None


def stored_path() -> dict[bytes, KnownPath]:
    """The path in the vectors' answers."""
    (entry,) = response_of(next(case for case in ASKED if case["path"] == "/path"))
    port = Port(entry["interface"])
    path = KnownPath(entry["timestamp"], entry["via"], entry["hops"], entry["expires"], [], port, bytes(32))
    return {entry["hash"]: path}


@pytest.mark.parametrize("case", ASKED, ids=lambda case: f"{case['path']} {case['request_payload'][62:]}")
def test_answers_are_the_references(case: Case) -> None:
    data = request_of(case).data
    if case["path"] == "/status":
        stats = response_of(ASKED[0])[0]
        answer: Any = answer_status(data, lambda: stats, lambda: 5)
    else:
        rates = {destination: Rate(FIXED) for destination in stored_path()}
        answer = answer_path(
            data, lambda dest, hops: path_table(stored_path(), dest, hops), lambda dest: rate_table(rates, dest)
        )
    assert (answer is not None) == case["responds"]
    assert answer == response_of(case)


@pytest.mark.parametrize(
    "data", [["table", "x"], ["table", None, "1"], ["table", None, True], ["rates", 7], b"", {}, 0]
)
def test_wrong_questions_have_no_answer(data: Any) -> None:
    assert answer_path(data, lambda dest, hops: [], lambda dest: []) is None


@pytest.mark.parametrize("transport", [True, False])
def test_statistics_have_the_keys_and_types_of_the_reference(transport: bool) -> None:
    shape = vectors("node", "rpc", "interface_stats_shape")
    pair = Pair()
    pair.a.config = NodeConfig(enable_transport=transport)
    listener = BackboneInterface(BackboneConfig(common=CommonConfig(name="l"), listen_ip="127.0.0.1", listen_port=0))
    pair.a._given.append(listener)
    pair.start()
    try:
        stats = Statistics(pair.a).tables(bytes(16), None)
    finally:
        pair.stop()
    only_with_transport = {"transport_id", "network_id", "transport_uptime", "probe_responder"}
    assert set(stats) == set(shape["top"]) - (set() if transport else only_with_transport)
    for table in (stats, *stats["interfaces"]):
        for key, word in shape["top" if table is stats else "interface"].items():
            if key in table:
                assert word == "nil" or table[key] is None or isinstance(table[key], KINDS[word]), key
    assert len(stats["interfaces"]) == 2 and all(set(shape["interface"]) <= set(one) for one in stats["interfaces"])
    assert msgpack.unpackb(msgpack.packb(stats)) == stats


def test_a_pace_is_the_average_between_two_looks() -> None:
    pace = Pace(100.0, 2)
    assert list(pace.look((50, 0), 110.0)) == [5.0, 0.0]
    assert list(pace.look((999, 999), 110.5)) == [5.0, 0.0]  # too soon to say anything else
    assert list(pace.look((70, 8), 112.0)) == [10.0, 4.0]


def test_violations_and_bursts_are_told() -> None:
    pair = Pair()
    pair.a.config = NodeConfig(enable_transport=True)
    pair.start()
    try:
        engine = pair.a._engine
        (port,) = engine.ports
        port.drops[Drop.ANNOUNCE_SIGNATURE] += 2
        port.drops[Drop.TOO_SHORT] += 1
        assert engine.transport is not None
        burst = engine.transport.intakes[port].announce_burst
        burst.active, burst.began_at = True, 7.0
        (table,) = Statistics(pair.a).tables(None, None)["interfaces"]
        assert table["protocol_violations"] == 3
        assert (table["burst_active"], table["pr_burst_active"], table["pr_burst_activated"]) == (True, False, 0)
        assert table["burst_activated"] == 7.0 + engine.unix_offset
    finally:
        pair.stop()


def test_paths_over_an_interface_that_is_down_are_not_shown(clock: Clock) -> None:
    pair = Pair()
    pair.a.config = NodeConfig(enable_transport=True)
    pair.start()
    try:
        inbox = pair.b.register(Identity(), "test", "x")
        pair.a.request_path(inbox.hash, PATIENCE)
        assert pair.a._management is not None
        remote = RemoteManagement(pair.a, pair.a._management)
        shown = remote._path(["table"])
        assert shown is not None and inbox.hash in {entry["hash"] for entry in shown}
        before = pair.a.status()["paths"]
        (port,) = pair.a._engine.ports
        with pair.a._reactor.turn:
            port.online = False
        assert remote._path(["table"]) == [] and before > 0 == pair.a.status()["paths"]
        with pair.a._reactor.turn:
            port.online = True
        assert pair.a.status()["paths"] == before
    finally:
        pair.stop()


KINDS: dict[str, Any] = {"int": (int, float), "float": float, "bool": bool, "bin": bytes, "str": str, "array": list}


# ------------------------------------------------------------------ over a link


def asked(pair: Pair, link: Link, path: str, data: Any) -> Any:
    """Ask `a` over a link, and what comes of it: when both have handled what is on the way, there is no answer."""
    with pair.b._reactor.turn as now:
        pending = ask(link._engine, path, data, now)
    assert pending is not None
    settle(pair.a)
    errands_done(pair.a)
    settle(pair.b)
    return pending.response if pending.status is RequestStatus.READY else None


def managed(pair: Pair, who: Identity | None) -> Link:
    management = pair.a._management
    assert management is not None
    (destination,) = management.destinations
    return pair.b.connect(destination.hash, "rnstransport", "remote", "management", timeout=PATIENCE, identity=who)


def test_who_is_listed_gets_answers_and_others_none(clock: Clock) -> None:
    friend = Identity()
    options: dict[str, Any] = {"enable_remote_management": True, "remote_management_allowed": (friend.hash,)}
    with pair_with(clock, enable_transport=True, **options) as pair:
        link = managed(pair, friend)
        stats, links = asked(pair, link, "/status", [True])
        assert stats["transport_id"] == pair.a._engine.transport_id and links == 0
        assert [one["name"] for one in stats["interfaces"]] == ["a"]
        inbox = pair.b.register(Identity(), "test", "x")
        before = stats["interfaces"][0]
        pair.a.request_path(inbox.hash, PATIENCE)
        (entry,) = asked(pair, link, "/path", ["table", inbox.hash, None])
        assert (entry["hash"], entry["hops"], entry["interface"]) == (inbox.hash, 1, "a")
        after = asked(pair, link, "/status", [True])[0]["interfaces"][0]
        grown = {key: after[key] - before[key] for key in ("ptxc", "ptxb", "arxc", "prxc", "atxc")}
        assert grown == {"ptxc": 1, "ptxb": 67, "arxc": 1, "prxc": 0, "atxc": 0}
        assert asked(pair, link, "/path", ["table", bytes(16)]) == []
        assert asked(pair, link, "/other", [True]) is None
        for who in (None, Identity()):
            assert asked(pair, managed(pair, who), "/status", [True]) is None
        assert link.is_active


def test_an_answer_too_large_for_the_link_is_not_sent_and_that_is_said_once(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    friend = Identity()
    pair = Pair(mtu_discovery=False)
    pair.a.config = NodeConfig(enable_remote_management=True, remote_management_allowed=(friend.hash,))
    pair.start()
    try:
        link = managed(pair, friend)
        with caplog.at_level(logging.WARNING):
            assert asked(pair, link, "/status", [True]) is None
            assert asked(pair, link, "/status", [True]) is None
        errands_done(pair.a)
        assert sum("not answered" in message for message in caplog.messages) == 1
        assert asked(pair, link, "/path", ["table"]) is not None
    finally:
        pair.stop()


def test_enabling_it_for_nobody_is_said(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    with pair_with(clock, enable_remote_management=True):
        assert "lists nobody" in caplog.text
