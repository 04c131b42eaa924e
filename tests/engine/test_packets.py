"""Packets off links: admission, receipts, proofs, ratchets, against the vectors.  Protocol 01, sections 6 to 9."""

from __future__ import annotations

import random

import pytest

from rnsfast.crypto.ed25519 import VerifyKey
from rnsfast.crypto.identity import Identity
from rnsfast.engine.destination import Destination, Direction, ProofStrategy, RatchetRing
from rnsfast.engine.engine import Engine
from rnsfast.engine.known import Path
from rnsfast.engine.port import Port
from rnsfast.engine.receipts import GRACE, LIMIT, Receipt, Status, packet_timeout
from rnsfast.wire.drop import Drop
from rnsfast.wire.packet import CTX_NONE, DATA, GROUP, PLAIN, SINGLE, make_raw, packet_hash
from rnsfast.wire.proof import proof_packet
from tests.engine.support import NOW, make_engine, make_link, make_port, message, sent, some_identity
from tests.vectors_support import Case, by_name, unhex, vectors
from tests.virtualnet import Recorder, VirtualNet

TRANSPORT = vectors("transport")

#: What is wrong, by the reference's words. Anything else means the packet got past the gate.
VIOLATIONS = {
    Drop.TOO_SHORT, Drop.TOO_MANY_HOPS, Drop.NO_DATA, Drop.PACKET_TOO_LONG, Drop.ANNOUNCE_TYPE, Drop.ANNOUNCE_TOO_LONG,
    Drop.ANNOUNCE_SIGNATURE, Drop.ANNOUNCE_DESTINATION, Drop.ANNOUNCE_SIZE, Drop.ANNOUNCE_KEY_CHANGED,
    Drop.PATH_REQUEST_SIZE,
}  # fmt: skip
FILTERED = {Drop.FILTERED, Drop.FOREIGN_TRANSPORT, Drop.BROADCAST_TOO_FAR, Drop.BROADCAST_ANNOUNCE}


def transport_node() -> tuple[Engine, Recorder, Port]:
    identity = Identity.from_private(unhex(TRANSPORT["own_transport_private_key"]))
    engine, recorder = make_engine(transport_identity=identity)
    assert engine.transport_id.hex() == TRANSPORT["own_transport_id"]
    return engine, recorder, make_port(engine, hw_mtu=1064)


def outcome(engine: Engine, port: Port, raw: bytes, now: float = NOW) -> str:
    before = port.drops.copy()
    engine.receive(port, [raw], now)
    new = list((port.drops - before).elements())
    assert len(new) <= 1
    if new and new[0] in VIOLATIONS:
        return "protocol_violation"
    if new and new[0] in FILTERED:
        return "filtered"
    return "ifac_violation" if new == [Drop.IFAC_UNEXPECTED] else "accepted"


@pytest.mark.parametrize("case", vectors("wire", "admission"), ids=by_name)
def test_admission(case: Case) -> None:
    identity = some_identity()
    engine, _ = make_engine(transport_identity=identity)
    engine.transport_id = unhex(case["transport_id_of_node"])
    port = make_port(engine, hw_mtu=case["hw_mtu"])
    got = [outcome(engine, port, unhex(frame)) for frame in case["frames"]]
    expected = list(case["outcomes"])
    if any(unhex(frame)[0] & 0x0F == 0x0C for frame in case["frames"]) and expected == ["accepted", "filtered"]:
        # Packets of links that are not ours are forgotten again: the link may still come, or be another node's.
        expected = ["accepted", "accepted"]
    assert got == expected


@pytest.mark.parametrize("case", TRANSPORT["packet_filter"]["cases"], ids=by_name)
def test_packet_filter(case: Case) -> None:
    raw = unhex(case["raw"])
    assert packet_hash(raw).hex() == case["packet_hash"]
    for known, passes in ((False, case["pass_first"]), (True, case["pass_when_hash_known"])):
        engine, _, port = transport_node()
        if known:
            engine.seen.add(packet_hash(raw))
        assert (outcome(engine, port, raw) != "filtered") is passes, known


@pytest.mark.parametrize("case", TRANSPORT["packet_filter"]["malformed"], ids=by_name)
def test_malformed_packets(case: Case) -> None:
    engine, recorder, port = transport_node()
    engine.receive(port, [unhex(case["raw"])], NOW)
    assert sum(port.drops.values()) == 1 and not recorder.events


# ---------------------------------------------------------------------- receipts


@pytest.mark.parametrize("case", vectors("wire", "receipts", "timeouts"), ids=str)
def test_receipt_timeouts(case: Case) -> None:
    assert packet_timeout(case["hops"], case["first_hop_bitrate"]) == pytest.approx(case["timeout_s"], rel=1e-12)


@pytest.mark.parametrize("case", vectors("wire", "receipts", "link_timeouts"), ids=str)
def test_receipt_timeouts_on_links(case: Case) -> None:
    link, _, _ = make_link(rtt=case["link_rtt_s"])
    receipt = link.send_data(b"x", NOW)
    assert receipt is not None and receipt.timeout == pytest.approx(case["timeout_s"], rel=1e-12)


@pytest.mark.parametrize("case", vectors("wire", "receipts", "created_for"), ids=by_name)
def test_what_receipts_are_made_for(case: Case) -> None:
    name = case["name"]
    engine, _ = make_engine()
    port = make_port(engine)
    if name.startswith("LINK"):
        link, _, _ = make_link(engine=engine)
        if case["context"] == CTX_NONE:
            assert (link.send_data(b"x", NOW) is not None) is case["receipt"]
        elif case["context"] == 0x0E:
            message(link.open_channel(NOW), b"x", NOW)  # an envelope waits for the proof in a receipt's stead
            assert bool(link.outstanding) is case["receipt"]
        else:
            link.send_sealed(case["context"], b"x", NOW)  # nothing else of ours waits for a proof: none would come
            assert not link.outstanding
        return
    if case["packet_type"]:
        return  # a proof: there is no call that would make a receipt for one
    kind = {"SINGLE": SINGLE, "PLAIN": PLAIN, "GROUP": GROUP}[name.split(",")[0]]
    identity = None if kind == PLAIN else Identity.from_public(some_identity().public_key)
    destination = Destination(identity, Direction.OUT, kind, "test")
    if kind == GROUP:
        destination.set_group_key(bytes(64), engine.entropy)
    receipt = engine.send_packet(destination, b"x", NOW, receipt="not wanted" not in name)
    assert (receipt is not None) is case["receipt"] and len(sent(port)) == 1
    assert len(engine.receipts) == int(case["receipt"])


def outbound(engine: Engine, identity: Identity) -> tuple[Receipt, bytes]:
    destination = Destination(Identity.from_public(identity.public_key), Direction.OUT, SINGLE, "test")
    receipt = engine.send_packet(destination, b"x", NOW)
    assert receipt is not None
    (raw,) = sent(engine.ports[0])
    return receipt, raw


def test_one_receipt_however_many_interfaces() -> None:
    engine, recorder = make_engine()
    first, second = make_port(engine, "first"), make_port(engine, "second")
    identity = some_identity()
    receipt, raw = outbound(engine, identity)
    assert (
        sent(second) == [raw]
        and receipt.packet_hash == packet_hash(raw)
        and list(engine.receipts.values()) == [receipt]
    )
    proof = proof_packet(receipt.packet_hash, identity.sign(receipt.packet_hash))
    engine.receive(second, [proof], NOW + 0.2)
    engine.receive(first, [proof], NOW + 0.3)
    assert receipt.status is Status.DELIVERED and receipt.rtt == pytest.approx(0.2)
    assert recorder.named("receipt_concluded") == [(receipt,)]
    assert receipt.timeout == 774 and not engine.receipts


def test_explicit_proofs_count_wherever_they_are_addressed() -> None:
    engine, _ = make_engine()
    port = make_port(engine)
    identity = some_identity()
    receipt, _ = outbound(engine, identity)
    h, signature = receipt.packet_hash, identity.sign(receipt.packet_hash)
    for wrong in (h + signature[::-1], signature[::-1], bytes(96), h + signature + b"x", signature[:63], h):
        engine.receive(port, [make_raw(0x03, h[:16], 0, wrong)], NOW)
        assert receipt.status is Status.SENT
    engine.receive(port, [make_raw(0x03, b"elsewhere\0\0\0\0\0\0\0", 0, h + signature)], NOW)
    assert receipt.status is Status.DELIVERED


def test_the_1025th_receipt_culls_the_first() -> None:
    engine, recorder = make_engine()
    make_port(engine)
    identity = some_identity()
    receipts = [outbound(engine, identity)[0] for _ in range(LIMIT + 1)]
    assert receipts[0].status is Status.CULLED and receipts[1].status is Status.SENT
    assert recorder.named("receipt_concluded") == [(receipts[0],)] and len(engine.receipts) == LIMIT
    engine.run_timers(NOW + 774 + GRACE)
    assert not engine.receipts and receipts[-1].status is Status.FAILED
    proof = proof_packet(receipts[5].packet_hash, identity.sign(receipts[5].packet_hash))
    engine.receive(engine.ports[0], [proof], NOW + 800)
    assert receipts[5].status is Status.FAILED  # late proofs do nothing


@pytest.mark.parametrize("case", vectors("wire", "proofs", "validate"), ids=by_name)
def test_proofs_are_judged_as_by_the_reference(case: Case) -> None:
    engine, _ = make_engine()
    port = make_port(engine)
    digest = unhex(case["packet_hash"])
    key = Identity.from_public(unhex(case["peer_public_key"])).verifying
    receipt = Receipt(engine, (engine.receipts,), digest, key, NOW, 12.0)
    engine.receipts[digest[:16]] = receipt
    engine.receive(port, [make_raw(0x03, digest[:16], 0, unhex(case["proof_data"]))], NOW)
    assert (receipt.status is Status.DELIVERED) is case["valid"]
    assert receipt.status == case["status"]


@pytest.mark.parametrize("case", vectors("wire", "proofs", "link"), ids=by_name)
def test_proofs_on_links_are_judged_as_by_the_reference(case: Case) -> None:
    for row in case["validate"]:
        link, _, port = make_link(link_id=unhex(case["link_id"]))

        link._peer_key = VerifyKey(unhex(case["prover_signing_public"]))
        digest = unhex(case["packet_hash"])
        receipt = Receipt(link.engine, (link.outstanding,), digest, None, NOW, 1.0)
        link.outstanding[digest] = receipt
        link.engine.receive(port, [make_raw(0x0F, link.link_id, 0, unhex(row["proof_data"]))], NOW)
        assert (receipt.status is Status.DELIVERED) is row["valid"], row["name"]


@pytest.mark.parametrize(
    "case",
    vectors("wire", "proofs", "prove"),
    ids=lambda c: f"{c['strategy']}-{c['implicit']}-{c['application_answer']}",
)
def test_proving(case: Case) -> None:
    engine, recorder = make_engine(implicit_proofs=case["implicit"])
    port = make_port(engine)
    identity = Identity.from_private(unhex(case["prover_private_key"]))
    raw = unhex(case["packet"])
    destination = Destination(identity, Direction.IN, SINGLE, "x")
    destination.hash = raw[2:18]  # the vectors do not say its name
    engine.register(destination)
    destination.proofs = ProofStrategy[case["strategy"].removeprefix("PROVE_")]
    assert packet_hash(raw).hex() == case["packet_hash"]
    if case["application_answer"]:  # PROVE_APP is asked above the engine, which then has it proved
        recorder.on["packet_arrived"] = lambda event: engine.prove(destination, event.packet_hash, event.port)
    engine.receive(port, [raw, raw], NOW)
    assert len(recorder.named("packet_arrived")) == 1
    assert [p.hex() for p in sent(port)] == ([case["proof"]["raw"]] if case["proof"] else [])


def test_proofs_leave_only_where_the_packet_came_from() -> None:
    net = VirtualNet(seed=4)
    node = net.node("n")
    here, elsewhere = node.port("here"), node.port("elsewhere")
    inbox = node.inbound("x")
    inbox.proofs = ProofStrategy.ALL
    public = Identity.from_public(inbox.identity.public_key)  # type: ignore[union-attr]
    raw = make_raw(DATA, inbox.hash, 0, public.encrypt(b"hello"))
    node.engine.receive(here, [raw], net.now)
    assert len(here.take()) == 1 and not elsewhere.take()
    node.engine.receive(here, [raw[:-1] + bytes((raw[-1] ^ 1,))], net.now)
    assert not here.take() and here.drops[Drop.DECRYPTION] == 1


def test_plain_packets_are_never_proved() -> None:
    engine, recorder = make_engine()
    port = make_port(engine)
    destination = Destination(None, Direction.IN, PLAIN, "open")
    destination.proofs = ProofStrategy.ALL
    engine.register(destination)
    raw = make_raw(PLAIN << 2, destination.hash, 0, b"to all")
    engine.receive(port, [raw, raw], NOW)
    assert len(recorder.named("packet_arrived")) == 2 and not sent(port)  # and duplicates are not filtered (trap 10)


# ---------------------------------------------------------------------- ratchets


def test_ratchet_rotation() -> None:
    group = vectors("wire", "ratchets")
    draws: list[bytes] = []
    ring = RatchetRing(interval=group["interval_s"], kept=group["retained"])
    start = 1_700_000_000.0
    for step in group["rotation"]:
        if step["rotated"]:
            draws.append(unhex(step["ring"][0]))
        assert ring.rotate(start + step["at"], lambda n: draws.pop(0)) is step["rotated"], step["at"]
        assert [key.hex() for key in ring.keys] == step["ring"]
        assert not draws


def test_a_flood_to_a_ratcheted_destination_is_bounded() -> None:
    rng = random.Random(1)
    identity = some_identity()
    destination = Destination(identity, Direction.IN, SINGLE, "x")
    destination.ratchets = RatchetRing([rng.randbytes(32) for _ in range(512)])
    tried: list[int] = []

    class Counting:
        has_private = True

        def decrypt(self, data: bytes, keys: list[bytes], enforce: bool) -> object:
            tried.append(len(keys))
            return identity.decrypt(data, keys, enforce)

    destination.identity = Counting()  # type: ignore[assignment]
    for n in range(200):
        assert destination.open(rng.randbytes(150), NOW + n * 0.001) is None
    assert sum(tried) < 70 * 512 and tried[-1] <= 4
    assert destination.open(rng.randbytes(150), NOW + 5) is None and tried[-1] == 512


def test_a_path_of_one_hop_is_direct_and_a_longer_one_goes_by_the_next_hop() -> None:
    engine, _ = make_engine()
    port = make_port(engine)
    identity = some_identity()
    destination = Destination(Identity.from_public(identity.public_key), Direction.OUT, SINGLE, "test")
    for hops, flags in ((0, 0x00), (1, 0x00), (2, 0x50), (5, 0x50)):
        engine.paths.put(destination.hash, Path(0.0, b"n" * 16, hops, 1e12, [], port, bytes(32)))
        receipt = engine.send_packet(destination, b"x", NOW)
        (raw,) = sent(port)
        assert raw[0] == flags and raw[1] == 0 and receipt is not None and receipt.packet_hash == packet_hash(raw)
        assert raw[2:18] == (b"n" * 16 if hops > 1 else destination.hash)
        assert receipt.timeout == pytest.approx(6 + 4000 / 10_000_000 + 6 * hops)
