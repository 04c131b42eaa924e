"""Announces, paths and path requests as an endpoint has them, against the vectors.  Protocol 02, 2, 6 and 7."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rnsfast.crypto.identity import Identity
from rnsfast.engine.announcing import EMISSION_LEAD
from rnsfast.engine.destination import Destination, Direction, RatchetRing
from rnsfast.engine.engine import Engine
from rnsfast.engine.known import KNOWN_LIMIT, PATH_LIMIT, Known, KnownTable, Path, PathTable
from rnsfast.engine.port import Mode, Port
from rnsfast.wire.announce import build_announce, emission_time, parse_announce
from rnsfast.wire.drop import Drop
from rnsfast.wire.names import destination_hash
from rnsfast.wire.packet import ANNOUNCE, CTX_PATH_RESPONSE, SINGLE, make_raw, packet_hash, parse_packet
from rnsfast.wire.pathrequest import PATH_REQUEST_DESTINATION, PathRequest, build_path_request
from tests.engine.support import NOW, Script, make_engine, make_port, sent, some_identity
from tests.engine.test_packets import VIOLATIONS
from tests.vectors_support import Case, by_name, maybe, unhex, vectors

GROUP = vectors("transport")
START = float(GROUP["clock_start"])


def node(now_unix: float = START, **options: object) -> tuple[Engine, object, Port]:
    identity = Identity.from_private(unhex(GROUP["own_transport_private_key"]))
    engine, recorder = make_engine(transport_identity=identity, unix_offset=now_unix - NOW, **options)
    return engine, recorder, make_port(engine, hw_mtu=1064)


@pytest.mark.parametrize("case", GROUP["announces"]["build"], ids=by_name)
def test_announces_are_built_byte_for_byte(case: Case) -> None:
    draws = [unhex(case["random5"])]
    if case["ratchet_private"]:
        draws.insert(0, unhex(case["ratchet_private"]))
    engine, recorder = make_engine(Script(*draws), unix_offset=case["time"] - NOW)
    port = make_port(engine)
    identity = Identity.from_private(unhex(case["private_key"]))
    destination = Destination(identity, Direction.IN, SINGLE, case["app_name"], *case["aspects"])
    if case["ratchet_private"]:
        destination.ratchets = RatchetRing()
    engine.register(destination)
    app_data = maybe(case["app_data"])
    response = case["path_response"]
    assert engine.announcing.announce(
        destination, app_data, NOW, port=port if response else None, is_path_response=response
    )
    (raw,) = sent(port)
    assert raw.hex() == case["raw"] and packet_hash(raw).hex() == case["fields"]["packet_hash"]
    if case["ratchet_public"]:
        assert engine.known.ratchets[destination.hash][0].hex() == case["ratchet_public"]
        assert recorder.named("ratchets_rotated") == [(destination,)]


#: Blackholes belong to transport, which comes later: its case is not an endpoint's.
ENDPOINT_CASES = [case for case in GROUP["announces"]["validate"] if case["name"] != "blackholed_identity"]


@pytest.mark.parametrize("case", ENDPOINT_CASES, ids=by_name)
def test_announces_are_judged_as_by_the_reference(case: Case) -> None:
    engine, recorder, port = node()
    raw = unhex(case["raw"])
    packet = parse_packet(raw)
    if case["name"] == "known_with_other_public_key":
        other = some_identity(5).public_key
        engine.known.put(packet.destination, Known(START, bytes(32), other, None))  # type: ignore[union-attr]
    engine.receive(port, [raw], NOW)
    heard = recorder.named("announce_heard")  # type: ignore[attr-defined]
    if case["name"] == "link_type":  # the reference lets it through once; a robust node refuses all but SINGLE
        assert not heard and port.drops[Drop.ANNOUNCE_TYPE] == 1
        return
    assert len(heard) == len(case["handler_calls"])
    violations = sum(n for drop, n in port.drops.items() if drop in VIOLATIONS)
    assert violations == case["protocol_violations"]
    assert sum(port.drops.values()) - violations == case["filter_hits"]
    assert bool(engine.paths.paths) is case["path_added"]
    assert bool(engine.known.entries) is case["known_destination_stored"]
    if not heard:
        return
    ((event,),), (call,) = heard, case["handler_calls"]
    assert (event.destination.hex(), event.identity.hash.hex()) == (call["destination_hash"], call["identity_hash"])
    assert (event.app_data, event.packet_hash.hex()) == (maybe(call["app_data"]), call["announce_packet_hash"])
    assert event.is_path_response is call["is_path_response"]
    path = engine.paths.paths[event.destination]
    assert (path.hops, path.next_hop.hex()) == (case["hops"], case["next_hop"])
    stored = engine.known.ratchets.get(event.destination)
    assert (stored and stored[0].hex()) == case["ratchet_stored"]


VALID = unhex(GROUP["announces"]["validate"][0]["raw"])


@settings(max_examples=200, deadline=None)
@given(st.integers(0, len(VALID) * 8 - 1))
def test_no_flipped_bit_is_accepted(bit: int) -> None:
    at = bit // 8
    raw = VALID[:at] + bytes((VALID[at] ^ 1 << bit % 8,)) + VALID[at + 1 :]
    engine, recorder, port = node()
    engine.receive(port, [raw], NOW)
    unsigned = at == 1 or at == 18 or (at == 0 and bit % 8 in (4, 5))  # hops, context, flags that may change on the way
    assert not recorder.named("announce_heard") or unsigned  # type: ignore[attr-defined]


@pytest.mark.parametrize("case", GROUP["path_rules"], ids=by_name)
def test_which_announces_are_taken(case: Case) -> None:
    engine, _ = make_engine(unix_offset=case["clock_at_start"] - NOW)
    ports = {
        name: make_port(engine, name, mode=Mode[case["modes"][name].upper()], gravity=case["gravity"][name])
        for name in ("A", "B")
    }
    now = NOW
    for number, event in enumerate(case["events"]):
        if event["event"] == "wait":
            now += event["seconds"]
            continue
        destination = next(iter(engine.paths.paths), b"")
        if event["event"] == "mark_unresponsive":
            engine.paths.paths[destination].unresponsive = True
            continue
        before = engine.paths.paths.get(destination)
        engine.receive(ports[event["if"]], [unhex(event["raw"])], now)
        (path,) = engine.paths.paths.values()
        assert (path is not before) is event["taken"], number
        assert (path.hops, path.port) == (event["path_hops"], ports[event["path_if"]])
        assert path.unresponsive is event["state_unresponsive"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6), st.booleans()), max_size=25), st.integers(0, 99))
def test_no_path_moves_to_an_older_announce(copies: list[tuple[int, int, bool]], seed: int) -> None:
    engine, _, port = node()
    other = make_port(engine, "other")
    identity, blobs = some_identity(), random.Random(seed)
    destination = Destination(identity, Direction.IN, SINGLE, "x")
    newest = -1
    for emitted, hops, elsewhere in copies:
        raw = announce(destination, int(START) + emitted, blobs.randbytes(5))
        raw = raw[:1] + bytes((hops - 1,)) + raw[2:]
        engine.receive(other if elsewhere else port, [raw, raw], NOW)
        path = engine.paths.paths[destination.hash]
        assert path.newest >= newest
        newest = path.newest
        assert engine.known.entries[destination.hash].emitted == newest


def announce(destination: Destination, emitted: int, entropy: bytes) -> bytes:
    from rnsfast.wire.announce import Announce, random_blob, signed_data

    made = Announce(
        destination.hash, destination.identity.public_key, destination.name_hash, random_blob(entropy, emitted),  # type: ignore[union-attr]
        None, b"", None,
    )  # fmt: skip
    return make_raw(ANNOUNCE, destination.hash, 0, build_announce(made, destination.identity.sign(signed_data(made))))  # type: ignore[union-attr]


def test_a_replayed_older_announce_changes_nothing() -> None:
    engine, recorder, port = node()
    destination = Destination(some_identity(), Direction.IN, SINGLE, "x")
    old, new = (announce(destination, int(START) + n, bytes(5)) for n in (0, 9))
    engine.receive(port, [new], NOW)
    engine.receive(port, [old], NOW + 400)
    entry = engine.known.entries[destination.hash]
    assert entry.packet_hash == packet_hash(new) and entry.heard_at == START
    assert len(recorder.named("announce_heard")) == 1 and port.drops[Drop.ANNOUNCE_STALE] == 1  # type: ignore[attr-defined]


def test_an_answer_with_nothing_newer_confirms_the_path() -> None:
    """Whoever asked within a second of an announce is answered with one of the same second."""
    engine, recorder, port = node()
    destination = Destination(some_identity(), Direction.IN, SINGLE, "x")
    engine.receive(port, [announce(destination, int(START), bytes(5))], NOW)
    answer = bytearray(announce(destination, int(START), b"other"))
    answer[18] = CTX_PATH_RESPONSE
    engine.receive(port, [bytes(answer)], NOW + 1)
    assert engine.paths.paths[destination.hash].confirmed == 1
    assert len(recorder.named("path_confirmed")) == 1  # type: ignore[attr-defined]


def test_the_echo_of_an_own_announce_is_no_path() -> None:
    engine, recorder, port = node()
    own = Destination(some_identity(), Direction.IN, SINGLE, "x")
    engine.register(own)
    engine.announcing.announce(own, b"data", NOW)
    (raw,) = sent(port)
    engine.receive(port, [raw], NOW + 1)
    assert not engine.paths.paths and not recorder.named("announce_heard")  # type: ignore[attr-defined]


def test_two_announces_in_a_second_have_two_emission_times() -> None:
    engine, _, port = node()
    own = Destination(some_identity(), Direction.IN, SINGLE, "x")
    engine.register(own)
    for _ in range(3):
        engine.announcing.announce(own, None, NOW)
    times = [emission_time(parse_announce(parse_packet(raw)).random_blob) for raw in sent(port)]  # type: ignore[union-attr,arg-type]
    assert times == [int(START), int(START) + 1, int(START) + 2]
    for _ in range(100):
        engine.announcing.announce(own, None, NOW)
    times = [emission_time(parse_announce(parse_packet(raw)).random_blob) for raw in sent(port)]  # type: ignore[union-attr,arg-type]
    assert times == sorted(times) and times[-1] == int(START) + EMISSION_LEAD  # the clock catches up with them
    own.last_emission += 86400  # the clock was set back
    engine.announcing.announce(own, None, NOW)
    assert own.last_emission == int(START)


# ---------------------------------------------------------------------- path requests


@pytest.mark.parametrize("case", GROUP["path_requests"], ids=by_name)
def test_path_requests_are_read(case: Case) -> None:
    engine, _, port = node(transport=True)
    assert engine.transport is not None
    seen: list[tuple[bytes, bytes | None, bytes]] = []

    def asked(port: Port, request: PathRequest, tag: bytes, now: float) -> None:
        seen.append((request.destination, request.transport_id, tag))

    engine.transport.path_requested = asked  # type: ignore[method-assign]
    engine.receive(port, [unhex(case["raw"])], NOW)
    if not case["accepted"]:
        assert not seen and sum(port.drops.values()) == 1
        return
    assert seen == [(unhex(case["destination"]), maybe(case["requestor_transport_id"]), unhex(case["tag"]))]
    engine.receive(port, [unhex(case["raw"])], NOW)
    assert len(seen) == 1 and port.drops[Drop.PATH_REQUEST_REPEATED] == 1
    assert unhex(case["dedup_key"]) in engine.announcing._tags


def path_request(target: bytes, tag: bytes) -> bytes:
    return make_raw(0x08, PATH_REQUEST_DESTINATION, 0, build_path_request(PathRequest(target, None, tag)))


def test_a_request_for_our_own_is_answered_where_it_came_from() -> None:
    engine, _, port = node()
    elsewhere = make_port(engine, "elsewhere")
    access_point = make_port(engine, "ap", mode=Mode.ACCESS_POINT)
    own = Destination(some_identity(), Direction.IN, SINGLE, "x")
    engine.register(own)
    engine.receive(port, [path_request(own.hash, b"1" * 16)] * 2, NOW)
    (raw,) = sent(port)
    assert not sent(elsewhere) and raw[:2] == b"\x01\x00" and raw[18] == CTX_PATH_RESPONSE
    engine.receive(access_point, [path_request(own.hash, b"2" * 16)], NOW)
    assert len(sent(access_point)) == 1  # its mode holds for announces of our own accord only


def test_a_flood_of_path_requests_makes_no_flood_of_signatures_nor_runs_ahead_of_the_clock() -> None:
    engine, _, port = node()
    own = Destination(some_identity(), Direction.IN, SINGLE, "x")
    engine.register(own)
    for n in range(200):
        engine.receive(port, [path_request(own.hash, n.to_bytes(16, "big"))], NOW + n * 0.004)
    answers = sent(port)
    assert len(answers) == 200 and len(set(answers)) <= 3
    times = [emission_time(parse_announce(parse_packet(raw)).random_blob) for raw in answers]  # type: ignore[union-attr,arg-type]
    assert times == sorted(times) and times[-1] <= START + 3
    engine.receive(port, [path_request(own.hash, b"later" + bytes(11))], NOW + 5)
    (later,) = sent(port)
    assert later not in answers


def test_own_tags_are_known() -> None:
    engine, _, port = node()
    own = Destination(some_identity(), Direction.IN, SINGLE, "x")
    assert engine.announcing.request_path(own.hash, NOW)
    (raw,) = sent(port)
    assert raw[:2] == b"\x08\x00" and len(raw) == 51
    engine.receive(port, [raw], NOW)
    assert port.drops[Drop.PATH_REQUEST_REPEATED] == 1  # a neighbour that recurses sends it back (trap T20)


# ---------------------------------------------------------------------- bounds


@pytest.mark.slow
def test_full_tables_evict_the_longest_unused_and_do_not_scan_for_each() -> None:
    port = Port("p")
    paths, known = PathTable(), KnownTable()
    count = PATH_LIMIT + 3000
    for n in range(count):
        key = n.to_bytes(16, "big")
        paths.put(key, Path(float(n), key, 1, 1e12, [], port, bytes(32)))
        known.put(key, Known(float(n), bytes(32), bytes(64), None))
        if n == 10:
            known.use(key, 1e9)
            paths.paths[key].heard_at = 1e9
    assert len(paths.paths) <= PATH_LIMIT and len(known.entries) <= KNOWN_LIMIT
    last = (count - 1).to_bytes(16, "big")
    kept, first = (10).to_bytes(16, "big"), (0).to_bytes(16, "big")
    for table in (paths.paths, known.entries):
        assert last in table and kept in table and first not in table


def test_names_and_hashes_agree() -> None:
    own = Destination(some_identity(), Direction.IN, SINGLE, "x")
    assert destination_hash(own.name_hash, own.identity.hash) == own.hash  # type: ignore[union-attr]
