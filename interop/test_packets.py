"""Announces, paths, single packets and their proofs, GROUP, PLAIN, ratchets and access codes, with a stock peer."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import pytest

from interop.harness import access, workspace
from interop.ours import LIMIT, OUR_NAME, ROLES, STOCK_NAME, WAYS, Duo, Role, duo, join, pour
from interop.proxy import LINK, PROOF, Frame, any_frame, is_announce
from interop.seeded import random_bytes
from rnsfast import GROUP, PLAIN, AnnounceHeard, Identity, PathNotFound
from rnsfast.node.storage import load_ring

HELLO = b"hello \xff world"


@pytest.fixture(scope="module", params=WAYS, ids="-".join)
def pair(request: pytest.FixtureRequest) -> Iterator[Duo]:
    kind, ours = request.param
    with workspace() as space, duo(space, kind, ours) as made:
        yield made


def announces(pair: Duo) -> queue.SimpleQueue[AnnounceHeard]:
    heard: queue.SimpleQueue[AnnounceHeard] = queue.SimpleQueue()
    pair.node.on_announce(heard.put)
    return heard


def inbox_with_queue(pair: Duo, *name: str, **options: Any) -> tuple[Any, queue.SimpleQueue[bytes]]:
    inbox, arrived = pair.node.register(options.pop("identity", Identity()), *name, **options), queue.SimpleQueue()
    inbox.on_packet(arrived.put)
    return inbox, arrived


# ------------------------------------------------------------ announces and paths
def test_we_hear_the_peers_announce(pair: Duo) -> None:
    heard = announces(pair)
    made = pair.peer.request("destination", name="interop.heard", announce=True, app_data=HELLO.hex())
    event = heard.get(timeout=LIMIT)
    while event.destination.hex() != made["dest"]:
        event = heard.get(timeout=LIMIT)
    assert event.app_data == HELLO and event.hops == 1 and event.identity.hash.hex() == made["identity"]
    assert pair.node.hops_to(event.destination) == 1 and pair.node.app_data(event.destination) == HELLO


def test_the_peer_hears_ours(pair: Duo) -> None:
    inbox = pair.node.register(Identity(), "interop", "announced")
    assert inbox.announce(HELLO)
    told = pair.peer.expect("announce", dest=inbox.hash.hex(), path_response=False)
    assert told["app_data"] == HELLO.hex() and told["hops"] == 1 and not told["ratchet"]
    assert told["identity"] == inbox.identity.hash.hex()


def test_announces_without_and_with_the_most_application_data(pair: Duo) -> None:
    inbox = pair.node.register(Identity(), "interop", "announced")
    for content in (None, bytes(317)):
        assert inbox.announce(content)
        told = pair.peer.expect("announce", dest=inbox.hash.hex())
        assert told["app_data"] == (None if content is None else content.hex())


def test_the_peer_answers_our_question(pair: Duo) -> None:
    made = pair.peer.request("destination", name="interop.asked", app_data=HELLO.hex())
    dest = bytes.fromhex(made["dest"])
    assert not pair.node.has_path(dest)
    pair.node.request_path(dest, LIMIT)
    assert pair.node.has_path(dest) and pair.node.hops_to(dest) == 1 and pair.node.app_data(dest) == HELLO
    known = pair.node.recall(dest)
    assert known is not None and known.hash.hex() == made["identity"]


def test_we_answer_the_peers_question(pair: Duo) -> None:
    inbox = pair.node.register(Identity(), "interop", "asked")
    inbox.app_data = HELLO
    found = pair.peer.request("wait_path", dest=inbox.hash.hex())
    assert found["found"] and found["hops"] == 1
    told = pair.peer.expect("announce", dest=inbox.hash.hex(), path_response=True)
    assert told["app_data"] == HELLO.hex() and told["hops"] == 1


def test_nobody_answers_for_what_nobody_has(pair: Duo) -> None:
    with pytest.raises(PathNotFound, match="nobody reachable"):
        pair.node.request_path(bytes(16), 1.0)
    assert not pair.peer.request("wait_path", dest=bytes(16).hex(), timeout=1)["found"]


# ------------------------------------------------------------ packets and proofs
@pytest.mark.parametrize("implicit", [True, False], ids=["implicit", "explicit"])
@pytest.mark.parametrize("whose", ["ours", "stock"])
def test_packets_and_proofs_both_ways(implicit: bool, whose: str) -> None:
    """Explicit proofs of one side, implicit ones of the other: either side reads both."""
    odd = {"implicit_proof": implicit}
    ours, stock = (odd if whose == side else {} for side in ("ours", "stock"))
    with workspace() as space, duo(space, our_node=ours, stock_node=stock, proxied=True) as pair:
        sizes: dict[str, set[int]] = {"ours": set(), "stock": set()}
        for side, lane in (("ours", pair.from_us), ("stock", pair.from_stock)):
            lane.watch(lambda frame, side=side: is_single_proof(frame) and bool(sizes[side].add(len(frame.raw) - 19)))
        dest = pair.stock_destination(proof="all")
        receipt = pair.node.outbox(dest, *STOCK_NAME.split(".")).send(HELLO)
        assert receipt is not None and receipt.wait(LIMIT) and receipt.rtt is not None
        assert pair.peer.expect("packet", dest=dest.hex())["data"] == HELLO.hex()
        inbox, arrived = inbox_with_queue(pair, *OUR_NAME)
        inbox.set_proofs("all")
        pair.peer.request("wait_path", dest=inbox.hash.hex())
        sent = pair.peer.request("send", name=".".join(OUR_NAME), dest=inbox.hash.hex(), data=HELLO.hex())
        assert sent["status"] == "delivered" and arrived.get(timeout=LIMIT) == HELLO
        assert sizes[whose] == {64 if implicit else 96}  # a proof with the hash of the packet, or without


def is_single_proof(frame: Frame) -> bool:
    return frame.kind == PROOF and frame.destination_type != LINK


@pytest.mark.parametrize(
    ("strategy", "answer", "proved"),
    [("all", True, True), ("none", True, False), ("app", True, True), ("app", False, False)],
)
def test_proofs_follow_the_strategy(pair: Duo, strategy: str, answer: bool, proved: bool) -> None:
    dest = pair.stock_destination(proof=strategy, prove=answer)
    receipt = pair.node.outbox(dest, *STOCK_NAME.split(".")).send(b"to the peer")
    inbox, arrived = inbox_with_queue(pair, *OUR_NAME)
    inbox.set_proofs(strategy, lambda data: answer)
    pair.peer.request("wait_path", dest=inbox.hash.hex())
    sent = pair.peer.request("send", name=".".join(OUR_NAME), dest=inbox.hash.hex(), data="0102", timeout=1)
    assert arrived.get(timeout=LIMIT) == b"\x01\x02"
    assert sent["status"] == ("delivered" if proved else "failed")
    assert pair.peer.expect("packet", dest=dest.hex())["data"] == b"to the peer".hex()
    assert receipt is not None and receipt.wait(LIMIT if proved else 0) is proved


def test_the_largest_packets(pair: Duo) -> None:
    dest = pair.stock_destination(proof="all")
    outbox = pair.node.outbox(dest, *STOCK_NAME.split("."))
    content = random_bytes("largest", outbox.mdu)
    receipt = outbox.send(content)
    assert receipt is not None and receipt.wait(LIMIT)
    assert pair.peer.expect("packet", dest=dest.hex())["data"] == content.hex()
    inbox, arrived = inbox_with_queue(pair, *OUR_NAME)
    inbox.set_proofs("all")
    pair.peer.request("wait_path", dest=inbox.hash.hex())
    name = ".".join(OUR_NAME)
    assert pair.peer.request("send", name=name, dest=inbox.hash.hex(), data=content.hex())["status"] == "delivered"
    assert arrived.get(timeout=LIMIT) == content


@pytest.mark.parametrize("size", [64, 32])
def test_group_packets_both_ways(pair: Duo, size: int) -> None:
    key, name = random_bytes(f"group {size}", size), f"interop.group{size}"
    shared = pair.peer.request("identity")
    common: dict[str, Any] = {"kind": "group", "identity": shared["identity"], "key": key.hex()}
    identity = Identity.from_private(bytes.fromhex(shared["private"]))

    here = pair.peer.request("destination", name=name + ".stock", **common)["dest"]
    outbox = pair.node.outbox(identity, *name.split("."), "stock", kind=GROUP)
    outbox.set_group_key(key)
    outbox.send(HELLO)
    assert pair.peer.expect("packet", dest=here)["data"] == HELLO.hex()

    inbox, arrived = inbox_with_queue(pair, *name.split("."), "ours", identity=identity, kind=GROUP)
    inbox.set_group_key(key)
    pair.peer.request("send", name=name + ".ours", data=HELLO.hex(), **common)
    assert arrived.get(timeout=LIMIT) == HELLO
    inbox.close()


def test_plain_packets_both_ways(pair: Duo) -> None:
    here = pair.peer.request("destination", name="interop.plain.stock", kind="plain")["dest"]
    outbox = pair.node.outbox(None, "interop", "plain", "stock", kind=PLAIN)
    assert outbox.hash.hex() == here
    assert outbox.send(HELLO) is None
    assert pair.peer.expect("packet", dest=here)["data"] == HELLO.hex()
    inbox, arrived = inbox_with_queue(pair, "interop", "plain", "ours", identity=None, kind=PLAIN)
    pair.peer.request("send", name="interop.plain.ours", kind="plain", data=HELLO.hex())
    assert arrived.get(timeout=LIMIT) == HELLO
    inbox.close()


# ------------------------------------------------------------ ratchets
def test_the_peer_encrypts_to_our_ratchet(pair: Duo) -> None:
    inbox, arrived = inbox_with_queue(pair, "interop", "ratcheted")
    inbox.set_proofs("all")
    inbox.enable_ratchets(pair.space.root / f"ratchets {inbox.hash.hex()}", enforce=True)
    assert inbox.announce(bytes(285))
    assert pair.peer.expect("announce", dest=inbox.hash.hex())["ratchet"]
    assert pair.peer.request("known", dest=inbox.hash.hex())["ratchet"]
    sent = pair.peer.request("send", name="interop.ratcheted", dest=inbox.hash.hex(), data=HELLO.hex())
    assert sent["status"] == "delivered" and arrived.get(timeout=LIMIT) == HELLO


def test_we_encrypt_to_the_peers_ratchet(pair: Duo) -> None:
    dest = pair.stock_destination(
        proof="all", ratchets=str(pair.space.root / f"stock ratchets {Identity().hash.hex()}")
    )
    receipt = pair.node.outbox(dest, *STOCK_NAME.split(".")).send(HELLO)
    assert receipt is not None and receipt.wait(LIMIT)
    got = pair.peer.expect("packet", dest=dest.hex())
    assert got["data"] == HELLO.hex() and got["ratchet"] is not None


def test_links_to_ratcheted_destinations_work_both_ways(pair: Duo) -> None:
    joint = join(pair, "initiator", ratchets=str(pair.space.root / f"stock ratchets {Identity().hash.hex()}"))
    with joint.link:
        joint.link.send(HELLO)
        assert joint.expect("link_packet")["data"] == HELLO.hex()


def test_packets_to_a_ratchet_we_have_left_behind_are_still_read() -> None:
    with workspace() as space, duo(space, proxied=True) as pair:
        inbox, arrived = inbox_with_queue(pair, "interop", "rotated")
        dest, path, proofs = inbox.hash.hex(), space.root / "ratchets", []

        def send() -> bytes:
            inbox.set_proofs("all")
            proofs.append(pair.peer.request("send", name="interop.rotated", dest=dest, data=HELLO.hex())["status"])
            return arrived.get(timeout=LIMIT)

        for hear in (True, False, True):  # the second announce never reaches the peer
            inbox.enable_ratchets(path, enforce=True)  # the first announce after this makes a new key
            if not hear:
                pair.from_us.drop_nth(is_announce, 1)
            passed = pair.from_us.watch(is_announce)
            assert inbox.announce() and passed.wait(LIMIT)
            if hear:
                pair.peer.expect("announce", dest=dest, ratchet=True)
            assert send() == HELLO
        assert proofs == ["delivered"] * 3
        assert len(load_ring(path, inbox.identity)) == 3


def test_a_peer_that_comes_back_with_a_new_ratchet_is_understood() -> None:
    with workspace() as space, duo(space, ours="listener") as pair:
        made = pair.peer.request("identity")
        about = {"name": STOCK_NAME, "identity": made["identity"], "ratchets": str(space.root / "r"), "proof": "all"}
        used = set()
        for life in range(2):
            if life:
                pair.peer.stop()
                pair.peer.start()
                pair.peer.request("identity", private=made["private"])
            pair.meet()
            heard = announces(pair)
            dest = bytes.fromhex(pair.peer.request("destination", announce=True, **about)["dest"])
            event = heard.get(timeout=LIMIT)
            while event.destination != dest:
                event = heard.get(timeout=LIMIT)
            receipt = pair.node.outbox(dest, *STOCK_NAME.split(".")).send(HELLO)
            assert receipt is not None and receipt.wait(LIMIT)
            used.add(pair.peer.expect("packet", dest=dest.hex())["ratchet"])
        assert len(used) == 2 and None not in used


# ------------------------------------------------------------ access codes
@pytest.mark.parametrize(("kind", "ours"), WAYS)
@pytest.mark.parametrize(
    "code",
    [access("net", "secret"), access("net", "secret", 8), access("net", "secret", 512), {"passphrase": "only"}],
    ids=["128 bits", "8 bits", "512 bits", "passphrase only"],
)
def test_behind_an_access_code(kind: str, ours: Any, code: dict[str, object]) -> None:
    proxied = kind != "udp"  # the proxy sees frames of streams
    with workspace() as space, duo(space, kind, ours, both=code, proxied=proxied) as pair:
        lanes = (pair.from_us, pair.from_stock) if proxied else ()
        open_frames = [lane.watch(lambda frame: not frame.masked) for lane in lanes]
        for role in ROLES:
            joint = join(pair, role, proof="all")
            with joint.link:
                assert joint.link.send(HELLO).wait(LIMIT)
                assert joint.expect("link_packet")["data"] == HELLO.hex()
        inbox, arrived = inbox_with_queue(pair, "interop", "behind")
        pair.peer.request("wait_path", dest=inbox.hash.hex())
        pair.peer.request("send", name="interop.behind", dest=inbox.hash.hex(), data=HELLO.hex(), wait=False)
        assert arrived.get(timeout=LIMIT) == HELLO
        assert not any(event.is_set() for event in open_frames)


@pytest.mark.parametrize("theirs", [access("net", "secret"), {}], ids=["other passphrase", "no passphrase"])
@pytest.mark.parametrize("ours", ["listener", "connector"])
def test_the_wrong_passphrase_gets_nothing(ours: Any, theirs: dict[str, Any]) -> None:
    wrong = access("net", "wrong")
    with workspace() as space, duo(space, ours=ours, both=theirs, our_section=wrong, meet=False, proxied=True) as pair:
        asked = pair.from_us.watch(any_frame)
        with pytest.raises(PathNotFound):
            pair.node.request_path(bytes.fromhex(pair.peer.request("destination", name=STOCK_NAME)["dest"]), 1.5)
        assert asked.wait(LIMIT)
        answered = pair.from_stock.watch(any_frame)
        inbox = pair.node.register(Identity(), *OUR_NAME)
        assert not pair.peer.request("wait_path", dest=inbox.hash.hex(), timeout=1.5)["found"]
        assert answered.wait(LIMIT) and any(port["drops"] for port in pair.node.status()["ports"])


@pytest.mark.parametrize("role", ROLES)
def test_we_look_as_if_we_were_some_hops_away(role: Role) -> None:
    """The option local_hops_delta: announces, packets, proofs and links agree, so that a peer minds nothing."""
    with workspace() as space, duo(space, our_node={"local_hops_delta": True}, proxied=True) as pair:
        seen: set[int] = set()
        plain: set[int] = set()
        pair.from_us.watch(lambda f: bool((plain if f.destination_type in (1, 2) else seen).add(f.raw[1])))
        inbox, arrived = inbox_with_queue(pair, "interop", "afar")
        inbox.set_proofs("all")
        inbox.announce()
        told = pair.peer.expect("announce", dest=inbox.hash.hex())
        assert 3 <= told["hops"] <= 8
        sent = pair.peer.request("send", name="interop.afar", dest=inbox.hash.hex(), data=HELLO.hex())
        assert sent["status"] == "delivered" and arrived.get(timeout=LIMIT) == HELLO
        joint = join(pair, role, stock={"readers": [1]})
        pour(joint.link.open_writer(1), HELLO * 100)
        assert joint.stock("received", stream=1)["size"] == len(HELLO) * 100
        assert seen == {told["hops"] - 1} and plain <= {0}
