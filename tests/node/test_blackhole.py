"""Unwanted identities: the list, its files, publishing and fetching it."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rnsfast import Identity, Node
from rnsfast.engine.port import Port
from rnsfast.engine.requests import Policy, RequestArrived, RequestHandler, respond
from rnsfast.engine.transport.blackhole import Ban
from rnsfast.node.config import NodeConfig
from rnsfast.node.managementblackhole import request
from rnsfast.node.managementlists import LOCAL, MAX_REASON, BlackholeFiles, as_map, fitting, read_list
from rnsfast.wire.requests import parse_request, path_hash
from rnsfast.wire.storedmsgpack import pack, unpack
from tests.loopback import PATIENCE, Clock, Pair
from tests.node.test_management import errands_done, pair_with
from tests.vectors_support import vectors

STORED = vectors("node", "persisted", "blackhole_local")
LISTED = next(case for case in vectors("node", "remote_management", "cases") if case["path"] == "/list")
OWN = bytes.fromhex(STORED["local_identity_hash"])
SOURCE = b"s" * 16
A, B, C = b"a" * 16, b"b" * 16, b"c" * 16
NOW = 1_790_000_000.0


# ------------------------------------------------------------------ lists and files


def test_the_references_file_is_read_and_written_alike(tmp_path: Path) -> None:
    (tmp_path / LOCAL).write_bytes(bytes.fromhex(STORED["file"]))
    files = BlackholeFiles(tmp_path)
    bans = files.load(OWN, [], NOW)
    assert {identity.hex(): (ban.until, ban.reason) for identity, ban in bans.items()} == {
        identity: (entry["until"], entry["reason"])
        for identity, entry in STORED["memory"].items()
        if entry["source"] == STORED["local_identity_hash"]
    }
    (tmp_path / LOCAL).unlink()
    assert files.save(LOCAL, bans)
    assert (tmp_path / LOCAL).read_bytes() == bytes.fromhex(STORED["file"])


def test_the_references_answer_is_read_and_made_alike() -> None:
    asked = parse_request(bytes.fromhex(LISTED["request_payload"]))
    assert getattr(asked, "path_hash", None) == path_hash("/list")
    answer = msgpack.unpackb(bytes.fromhex(LISTED["response_payload"]), strict_map_key=False)[1]
    bans = {i: Ban(entry["source"], entry["until"], entry["reason"]) for i, entry in answer.items()}
    assert as_map(bans) == answer
    assert read_list(answer, SOURCE, NOW) == {i: Ban(SOURCE, ban.until, ban.reason) for i, ban in bans.items()}


@pytest.mark.parametrize("found", [None, [], 7, b"", "x", [[A, {}]]])
def test_what_is_no_list_is_refused(found: Any) -> None:
    assert read_list(found, SOURCE, NOW) is None


@pytest.mark.parametrize(
    ("identity", "entry"),
    [
        (b"a" * 15, {}), ("a" * 16, {}), (7, {}), (A, None), (A, []), (A, {"until": "later"}), (A, {"until": True}),
        (A, {"until": float("nan")}), (A, {"until": float("inf")}), (A, {"until": NOW}), (A, {"reason": b"why"}),
        (A, {"reason": 5}),
    ],
)  # fmt: skip
def test_wrong_entries_are_left_out_and_the_others_taken(identity: Any, entry: Any) -> None:
    assert read_list({identity: entry, B: {"until": None, "reason": "r"}}, SOURCE, NOW) == {B: Ban(SOURCE, None, "r")}


def test_who_said_so_is_not_taken_from_the_list_and_reasons_are_bounded() -> None:
    found = read_list({A: {"source": OWN, "reason": "x\n\x1b[0m" + "y" * 999}}, SOURCE, NOW)
    assert found is not None
    ban = found[A]
    assert ban.source == SOURCE and ban.reason is not None
    assert len(ban.reason) == MAX_REASON and ban.reason.isprintable()


def test_a_list_of_a_million_is_taken_up_to_the_limit() -> None:
    entry = {"until": None}
    huge = {n.to_bytes(16, "big"): entry for n in range(1_000_000)}
    found = read_list(huge, SOURCE, NOW)
    assert found is not None and len(found) == 65_536


@given(st.binary(max_size=200))
def test_whatever_bytes_come_nothing_is_raised(data: bytes) -> None:
    read_list(unpack(data), SOURCE, NOW)


def test_as_much_as_fits_is_chosen() -> None:
    bans = {bytes((n,)) * 16: Ban(SOURCE, None, "why") for n in range(50)}
    for size in (0, 5, 70, 431, 1000, 100_000):
        chosen = fitting(bans, size)
        assert len(pack(chosen)) <= max(size, 1)
        assert list(chosen) == list(bans)[: len(chosen)]
    assert len(fitting(bans, 100_000)) == 50 and fitting(bans, 431)


def test_ones_own_entries_take_precedence_and_only_configured_sources_count(tmp_path: Path) -> None:
    files = BlackholeFiles(tmp_path)
    files.save(LOCAL, {A: Ban(OWN, None, "mine")})
    files.save(SOURCE.hex(), {A: Ban(SOURCE, None, "theirs"), B: Ban(SOURCE)})
    files.save(C.hex(), {C: Ban(C)})
    (tmp_path / (b"d" * 16).hex()).write_bytes(b"\xc1 damaged")
    assert files.load(OWN, [SOURCE, b"d" * 16], NOW) == {A: Ban(OWN, None, "mine"), B: Ban(SOURCE)}


# ------------------------------------------------------------------ in a node


def test_a_banned_identity_is_not_heard_its_paths_go_and_lifting_the_ban_brings_it_back(clock: Clock) -> None:
    with pair_with(clock) as pair:
        who = Identity()
        inbox = pair.b.register(who, "test", "x")
        pair.a.request_path(inbox.hash, PATIENCE)
        assert pair.a.blackhole(who.hash, reason="spam") and not pair.a.blackhole(who.hash)
        assert not pair.a.has_path(inbox.hash)
        assert pair.a.blackholed() == {who.hash: Ban(pair.a._engine.transport_id, None, "spam")}
        clock.advance(2.0, pair.a, pair.b)
        inbox.announce()
        other = pair.b.register(Identity(), "test", "y")
        pair.a.request_path(other.hash, PATIENCE)  # what was announced before has been looked at
        assert not pair.a.has_path(inbox.hash)
        assert pair.a.unblackhole(who.hash) and not pair.a.unblackhole(who.hash)
        clock.advance(2.0, pair.a, pair.b)
        pair.a.request_path(inbox.hash, PATIENCE)


def test_bans_outlive_the_node_and_expire(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("[reticulum]\nshare_instance = no\nenable_transport = yes\n")
    end = time.time() + 1000
    with Node(tmp_path) as node:
        node.blackhole(A, reason="spam")
        node.blackhole(B, until=end)
        own = node._engine.transport_id
        assert not node.blackhole(own)
        with pytest.raises(ValueError, match="16 bytes"):
            node.blackhole(b"short")
    with Node(tmp_path) as node:
        assert node.blackholed() == {A: Ban(own, None, "spam"), B: Ban(own, end, None)}
        node._engine.unix_offset += 2000
        assert list(node.blackholed()) == [A]
        assert node.blackhole(B)  # again


def with_source(pair: Pair, clock: Clock) -> bytes:
    """`b` fetches from `a`. Their identities are made at start, so the sources are set afterwards."""
    assert pair.b._management is not None
    blackholes, source = pair.b._management.blackholes, pair.a._engine.transport_id
    blackholes._sources = (source,)
    blackholes._fetch_at(pair.b._reactor.now() + 20.0, source)
    return source


def when_banned(node: Node, monkeypatch: pytest.MonkeyPatch) -> queue.SimpleQueue[int]:
    """How many were taken, of each list that was fetched."""
    taken: queue.SimpleQueue[int] = queue.SimpleQueue()
    assert node._management is not None
    blackholes = node._management.blackholes
    take: Callable[..., int] = blackholes._take_list

    def note(bans: Any) -> int:
        count = take(bans)
        taken.put(count)
        return count

    monkeypatch.setattr(blackholes, "_take_list", note)
    return taken


def test_lists_are_published_and_fetched(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    with pair_with(clock, publish_blackhole=True, enable_transport=True) as pair:
        pair.a.blackhole(A, reason="spam")
        pair.a.blackhole(pair.b._engine.transport_id)  # no list makes a node deaf to itself
        source = with_source(pair, clock)
        taken = when_banned(pair.b, monkeypatch)
        clock.advance(20.1, pair.b)
        assert taken.get(timeout=PATIENCE) == 1
        assert pair.b.blackholed() == {A: Ban(source, None, "spam")}
        pair.a.blackhole(B)
        errands_done(pair.b)
        clock.advance(3601.0, pair.b)
        assert taken.get(timeout=PATIENCE) == 1
        assert set(pair.b.blackholed()) == {A, B}


def test_a_source_that_answers_nonsense_is_asked_again_later(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers: list[Any] = [[A], {A: {"until": "x"}, b"short": {}, B: {"source": A}}]
    with pair_with(clock, publish_blackhole=True) as pair:
        assert pair.a._management is not None
        (destination,) = pair.a._management.destinations

        def answer(arrived: RequestArrived) -> None:
            respond(arrived, answers.pop(0), pair.a._reactor.now())

        destination.requests.register(RequestHandler("/list", answer, Policy.ALL))
        source = with_source(pair, clock)
        taken = when_banned(pair.b, monkeypatch)
        with caplog.at_level(logging.WARNING):
            clock.advance(20.1, pair.b)
            errands_done(pair.b)
        assert "no list" in caplog.text and taken.empty()
        clock.advance(301.0, pair.b)
        assert taken.get(timeout=PATIENCE) == 1
        assert pair.b.blackholed() == {B: Ban(source)}


def test_a_long_list_is_shortened_to_a_packet_with_ones_own_entries_first(clock: Clock) -> None:
    pair = Pair(mtu_discovery=False)
    pair.a.config = NodeConfig(publish_blackhole=True)
    pair.start()
    try:
        assert pair.a._management is not None
        pair.a._management.blackholes._take_list({bytes((n,)) * 16: Ban(SOURCE) for n in range(40)})
        pair.a.blackhole(A)
        (destination,) = pair.a._management.destinations
        with pair.b.connect(destination.hash, "rnstransport", "info", "blackhole", timeout=PATIENCE) as link:
            found = request(pair.b, link, "/list", b"ignored")
        assert next(iter(found)) == A and 3 < len(found) < 41
    finally:
        pair.stop()


def test_a_name_is_resolved_to_nothing(clock: Clock) -> None:
    with pair_with(clock) as pair:
        assert pair.a.resolve_identity("somebody") is None


def test_stored_paths_to_a_banned_identity_do_not_come_back(clock: Clock) -> None:
    with pair_with(clock, enable_transport=True) as pair:
        who, other = Identity(), Identity()
        mine, theirs = (pair.b.register(each, "test", "x").hash for each in (other, who))
        for destination in (mine, theirs):
            pair.a.request_path(destination, PATIENCE)
        engine = pair.a._engine
        paths = dict(engine.paths.paths)
        assert engine.transport is not None
        with pair.a._reactor.turn:
            engine.stored_paths[b"i" * 32] = list(paths.items())
            engine.transport.tunnels.restore(b"t" * 32, dict(paths), 1e12)
        pair.a.blackhole(who.hash)
        assert [list(tunnel.paths) for tunnel in engine.transport.tunnels.tunnels.values()] == [[mine]]
        assert pair.a.has_path(mine) and not pair.a.has_path(theirs)
        with pair.a._reactor.turn as now:
            engine.paths.paths.clear()
            engine.attach(Port("i", interface_hash=b"i" * 32), now)
            assert list(engine.paths.paths) == [mine]


def test_a_node_that_waits_for_a_source_stops_at_once(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Event()
    with pair_with(clock, blackhole_sources=(SOURCE,)) as pair:
        connect = pair.a.connect
        monkeypatch.setattr(pair.a, "connect", lambda *a, **k: (asked.set(), connect(*a, **k))[1], raising=False)
        clock.advance(20.1, pair.a)
        assert asked.wait(PATIENCE)
        began = time.monotonic()
        pair.a.stop()
        assert time.monotonic() - began < 4.0  # less than the patience with threads that do not end
