"""Handshakes and the traffic after them, against the transcripts of the reference, in both roles."""

from __future__ import annotations

import pytest

from rnsfast.crypto.ed25519 import SigningKey
from rnsfast.crypto.identity import Identity
from rnsfast.crypto.token import TokenKey
from rnsfast.engine.channel import Envelope
from rnsfast.engine.destination import Destination, Direction, ProofStrategy
from rnsfast.engine.engine import Engine
from rnsfast.engine.known import Path
from rnsfast.engine.link import Link
from rnsfast.engine.linkstate import Reason, State
from rnsfast.engine.port import Port
from rnsfast.engine.receipts import Receipt, Status
from rnsfast.wire.handshake import decode_signalling, link_proof_signed_data
from rnsfast.wire.packet import SINGLE, link_id, packet_hash
from tests.engine.support import Script, make_engine, make_link, make_port, message, sent, some_identity
from tests.vectors_support import Case, by_name, unhex, vectors
from tests.virtualnet import Recorder

HANDSHAKES = [case for case in vectors("link", "handshakes") if "keys" in case]
BITRATE = 1_000_000  # bit/s; gives the 12.004 s of the vectors


class End:
    """One engine with one port."""

    engine: Engine
    recorder: Recorder
    port: Port
    link: Link

    def receive(self, raw: bytes, now: float) -> list[bytes]:
        self.engine.receive(self.port, [raw], now)
        return sent(self.port)


class Responder(End):
    def __init__(self, private: str, name: str, hw_mtu: int, x25519: bytes | None = None) -> None:
        self.engine, self.recorder = make_engine(Script(*([x25519] if x25519 else [])))
        self.port = make_port(self.engine, hw_mtu=hw_mtu, bitrate=BITRATE)
        app, *aspects = name.split(".")
        identity = Identity.from_private(unhex(private))
        self.destination = Destination(identity, Direction.IN, SINGLE, app, *aspects)
        self.destination.proofs = ProofStrategy.ALL
        self.engine.register(self.destination)


class Initiator(End):
    def __init__(self, public: str, name: str, hw_mtu: int, x25519: str, ed25519: str, now: float = 0.0) -> None:
        self.engine, self.recorder = make_engine(Script(unhex(x25519), unhex(ed25519)))
        self.port = make_port(self.engine, hw_mtu=hw_mtu, bitrate=BITRATE)
        app, *aspects = name.split(".")
        self.destination = Destination(Identity.from_public(unhex(public)), Direction.OUT, SINGLE, app, *aspects)
        self.destination.proofs = ProofStrategy.ALL
        target = self.destination.hash
        self.engine.paths.put(target, Path(0.0, target, 1, 1e12, [], self.port, bytes(32)))
        self.link = self.engine.open_link(self.destination, now)
        (self.request,) = sent(self.port)


def pair(case: Case) -> tuple[Initiator, Responder]:
    keys = case["keys"]
    a = Initiator(
        keys["responder_identity_public"], keys["destination_name"], case["hw_mtu_initiator_interface"],
        keys["initiator_x25519_private"], keys["initiator_ed25519_private"],
    )  # fmt: skip
    b = Responder(
        keys["responder_identity_private"], keys["destination_name"], case["hw_mtu_responder_interface"],
        unhex(keys["responder_x25519_private"]),
    )  # fmt: skip
    return a, b


def establish(case: Case) -> tuple[Initiator, Responder]:
    """Both ends, each fed the packets of the transcript, at the transcript's times."""
    a, b = pair(case)
    assert a.request.hex() == case["request_sent"]
    assert a.link.link_id == unhex(case["link_id"]) == link_id(unhex(case["request_received"]))
    answer = b.receive(unhex(case["request_received"]), 0.0)
    (b.link,) = b.engine.links.values()
    if case["name"] != "proof_without_signalling":  # that one was made by an old peer
        assert [raw.hex() for raw in answer] == [case["proof"]]
    assert b.link.state is State.HANDSHAKE and not b.recorder.events
    (rtt_packet,) = a.receive(unhex(case["proof"]), case["initiator"]["rtt"])
    recorded = next(step for step in case["transcript"] if step["name"] == "rtt")
    key = TokenKey(unhex(case["keys"]["derived_key"]))
    assert len(rtt_packet) == recorded["size"] and rtt_packet[:19] == unhex(recorded["raw"])[:19]
    assert key.open(rtt_packet[19:]) == unhex(recorded["plaintext"])
    assert b.receive(unhex(recorded["raw"]), case["responder"]["rtt"]) == []
    return a, b


@pytest.mark.parametrize("case", HANDSHAKES, ids=by_name)
def test_handshake(case: Case) -> None:
    a, b = establish(case)
    for end, name in ((a, "initiator"), (b, "responder")):
        expected, link = case[name], end.link
        assert link.state is State.ACTIVE
        assert end.recorder.named("link_established") == [(link,)]
        for field in ("mtu", "mdu", "mode", "rtt", "keepalive", "establishment_timeout"):
            assert getattr(link, field) == pytest.approx(expected[field], rel=1e-12), (name, field)
        stale = expected["stale_time"]
        assert link.stale_time == pytest.approx(max(stale, 60.0) if end is a else stale, rel=1e-12)
    assert a.link.remote_identity is not None and b.link.remote_identity is None


def expect_proof(end: End, packet_hash: str, now: float) -> Receipt:
    """The packet of the transcript was sent by `end`: with another IV than ours, so its receipt is laid in."""
    link = end.link
    receipt = Receipt(
        end.engine, (link.outstanding, link._receipts), unhex(packet_hash), link._peer_key, now, link.packet_timeout
    )
    link.outstanding[receipt.packet_hash] = link._receipts[receipt.packet_hash] = receipt
    return receipt


@pytest.mark.parametrize("case", [c for c in HANDSHAKES if len(c["transcript"]) > 3], ids=by_name)
def test_transcript(case: Case) -> None:
    a, b = establish(case)
    happened: list[str] = []
    names = {id(a): "initiator", id(b): "responder"}
    for end in (a, b):
        end.recorder.events.clear()
        end.link.open_channel(1.0)
        where = names[id(end)]
        end.recorder.on["link_data"] = lambda link, packets, hashes, w=where: happened.extend(
            f"{w}.packet:{data.hex()}" for data in packets
        )
        end.recorder.on["peer_identified"] = lambda link, w=where: happened.append(
            f"{w}.identified:{link.remote_identity.hash.hex()}"
        )
        end.recorder.on["link_closed"] = lambda link, w=where: happened.append(f"{w}.closed:{int(link.reason)}")
    key = TokenKey(unhex(case["keys"]["derived_key"]))
    steps = case["transcript"][3:]
    answers: list[bytes] = []
    waiting: Receipt | Envelope | None = None
    for number, step in enumerate(steps):
        now = 2.0 + number * 0.001
        sender, receiver = (a, b) if step["dir"] == "i2r" else (b, a)
        raw = unhex(step["raw"])
        if step["packet_type"] == "PROOF":
            assert answers == [raw], step["name"]  # Ed25519 is deterministic
            assert receiver.link.outstanding
            answers = receiver.receive(raw, now)
            assert not answers and not receiver.link.outstanding
            if isinstance(waiting, Receipt):
                assert waiting.status is Status.DELIVERED
                assert waiting.timeout == pytest.approx(step["receipt_timeout"])
            else:
                assert receiver.link.open_channel(now).is_idle
            continue
        if step["name"] == "keepalive_pong":
            assert answers == [raw]
        own = send_like(sender, step, now)
        if step["encrypted"]:
            assert len(own) == step["size"] and own[:19] == raw[:19]
            assert key.open(own[19:]) == unhex(step["plaintext"])
        elif own:
            assert own == raw
        if step["context"] == 0x0E:
            (waiting,) = sender.link.open_channel(now).ring.values()
            waiting.hashes = [unhex(step["packet_hash"])]
            sender.link.outstanding = {waiting.hashes[0]: waiting}
        elif step["context"] == 0:
            waiting = expect_proof(sender, step["packet_hash"], now)
        answers = receiver.receive(raw, now)
    assert not answers
    assert happened == [e for e in case["events"] if not e.endswith(".established")]
    assert a.link.reason == case["initiator_teardown_reason"] and b.link.reason == case["responder_teardown_reason"]
    assert a.link.state is b.link.state is State.CLOSED and not a.engine.links and not b.engine.links


def send_like(end: End, step: Case, now: float) -> bytes:
    """Do what the reference did at this step of the transcript; returns the one packet that left."""
    link, context = end.link, step["context"]
    if context == 0x00:
        receipt = link.send_data(unhex(step["plaintext"]), now)
        assert receipt is not None
        raw = sent(end.port)
        link.outstanding.clear()
        link._receipts.clear()
    elif context == 0xFB:
        private = step["identity_private"]
        assert link.identify(Identity.from_private(unhex(private)), now)
        raw = sent(end.port)
    elif context == 0xFC:
        link.close(now)
        raw = sent(end.port)
    elif context == 0x0E:
        plain = unhex(step["plaintext"])
        assert message(link.open_channel(now), plain[6:], now, int.from_bytes(plain[:2], "big")).sent
        raw = sent(end.port)
    else:
        return b""  # pings have a test of their own; the pong was compared
    assert len(raw) == 1
    return raw[0]


@pytest.mark.parametrize("request_case", ["request_without_signalling", "full_500"])
@pytest.mark.parametrize("proof_size", [96, 99])
def test_requests_and_proofs_with_and_without_signalling(request_case: str, proof_size: int) -> None:
    """64 and 67 bytes, 96 and 99 bytes: all four combinations come to 500 bytes (trap T13)."""
    case = next(c for c in HANDSHAKES if c["name"] == request_case)
    a, b = pair(case)
    (proof,) = b.receive(unhex(case["request_received"]), 0.0)
    (b.link,) = b.engine.links.values()
    if proof_size == 96:
        key = b.destination.identity.signing  # type: ignore[union-attr]
        x25519 = proof[83:115]
        signature = key.sign(link_proof_signed_data(a.link.link_id, x25519, key.public, b""))
        proof = proof[:19] + signature + x25519
    (rtt,) = a.receive(proof, 0.1)
    b.receive(rtt, 0.1)
    assert (a.link.state, b.link.state, a.link.mtu, b.link.mtu) == (State.ACTIVE, State.ACTIVE, 500, 500)


# ---------------------------------------------------------------------- negative cases

NEGATIVE = vectors("link", "negative")
LINK_NAME = "vectors.link"


def negatives(prefix: str) -> list[Case]:
    return [case for case in NEGATIVE if case["name"].startswith(prefix)]


@pytest.mark.parametrize("case", [c for c in negatives("request_") if "first_request" not in c], ids=by_name)
def test_link_requests(case: Case) -> None:
    b = Responder(case["responder_identity_private"], LINK_NAME, case["interface_hw_mtu"])
    assert b.destination.hash.hex() == case["destination_hash"]
    answer = b.receive(unhex(case["raw"]), 0.0)
    if case["expect"] == "drop":
        assert not answer and not b.engine.links and sum(b.port.drops.values()) == 1
        return
    (b.link,) = b.engine.links.values()
    assert len(answer) == 1
    mtu = decode_signalling(answer[0][-3:])[0]
    assert mtu == b.link.mtu == (500 if case["expect"] == "drop_or_500" else case["reference"]["mtu"])


def test_a_replayed_request_with_another_mtu_changes_nothing() -> None:
    (case,) = negatives("request_replayed")
    b = Responder(case["responder_identity_private"], LINK_NAME, 16384)
    assert len(b.receive(unhex(case["first_request"]), 0.0)) == 1
    (b.link,) = b.engine.links.values()
    key = b.link.key
    assert b.receive(unhex(case["first_request"]), 0.1) == []
    assert b.receive(unhex(case["raw"]), 0.2) == []
    assert list(b.engine.links.values()) == [b.link] and b.link.key is key and b.link.link_id.hex() == case["link_id"]


def initiator_for(case: Case) -> Initiator:
    request = unhex(case["request"])
    mtu, _ = decode_signalling(request[-3:])
    a = Initiator(
        case["responder_identity_public"], LINK_NAME, mtu,
        case["initiator_x25519_private"], case["initiator_ed25519_private"],
    )  # fmt: skip
    assert a.request == request
    return a


@pytest.mark.parametrize("case", negatives("proof_"), ids=by_name)
def test_link_proofs(case: Case) -> None:
    a = initiator_for(case)
    answer = a.receive(unhex(case["raw"]), 0.1)
    if case["expect"] == "drop":
        assert a.link.state is State.PENDING and not answer and not a.recorder.events
        answer = a.receive(unhex(case["good_proof"]), 0.2)  # and a good one afterwards still establishes
    assert a.link.state is State.ACTIVE and len(answer) == 1
    assert a.recorder.named("link_established") == [(a.link,)]
    assert a.link.mtu <= a.port.hw_mtu  # never more than the own interface carries, whatever is signed


@pytest.mark.parametrize("case", negatives("link_"), ids=by_name)
def test_packets_on_links(case: Case) -> None:
    initiator = case["receiver"] == "initiator"
    before = State(case["reference"]["status_before"])
    link, recorder, port = make_link(
        initiator=initiator, key=unhex(case["derived_key"]), link_id=unhex(case["link_id"]), state=before, rtt=0.01
    )
    link.destination.proofs = ProofStrategy.ALL
    first = some_identity(9)
    if case["name"] == "link_identify_second":
        link.remote_identity = first
    inbound, data, rtt = link.last_inbound, link.last_data, link.rtt
    link.engine.receive(port, [unhex(case["raw"])], 1000.5)
    answers = sent(port)
    name = case["name"]
    events = [event[0] for event in recorder.events]
    if case["expect"] == "drop":
        assert (link.state, link.rtt) == (before, rtt) and not answers and not events, name
        assert (link.last_inbound, link.last_data) == (inbound, data), "not even counted as a sign of life"
        assert sum(port.drops.values()) == 1
        if name == "link_identify_second":
            assert link.remote_identity is first
    elif case["expect"] == "close":
        assert link.state is State.CLOSED
        wanted = [e for e in case["reference"]["events"] if ".closed:" in e]
        assert int(link.reason or 0) == int(wanted[0].split(":")[1])
        assert len(answers) == len(case["reference"]["sent"])
        if before is State.ACTIVE:
            assert events == ["link_closed"]
    elif case["expect"] == "accept":
        # The first packet that opens activates (protocol 03, 7): the link was in HANDSHAKE or ACTIVE, now it is ACTIVE.
        assert link.state is State.ACTIVE and link.last_inbound == 1000.5
        wanted = [e.split(".")[1] for e in case["reference"]["events"]]
        got = []
        for event in recorder.events:
            if event[0] == "link_data":
                got += [f"packet:{data.hex()}" for data in event[2]]
            elif event[0] == "peer_identified":
                got.append(f"identified:{event[1].remote_identity.hash.hex()}")
            elif event[0] == "link_established" and wanted == ["established"]:
                got.append("established")
        assert got == wanted
        assert len(answers) == len(case["reference"]["sent"])
    else:
        assert case["expect"] in ("either", "drop_or_defer")
        assert link.state in (before, State.ACTIVE)


@pytest.mark.parametrize("case", negatives("packet_proof_"), ids=by_name)
def test_packet_proofs_on_links(case: Case) -> None:
    link, _, port = make_link(initiator=True, key=unhex(case["derived_key"]), link_id=unhex(case["link_id"]))
    identity = Identity.from_public(unhex(case["responder_identity_public"]))
    link._peer_key, link._signing = identity.verifying, SigningKey(unhex(case["initiator_ed25519_private"]))
    end = End()
    end.engine, end.link, end.port = link.engine, link, port
    receipt = expect_proof(end, packet_hash(unhex(case["packet"])).hex(), 1000.0)
    link.engine.receive(port, [unhex(case["raw"])], 1000.1)
    if case["expect"] == "drop":
        assert receipt.status is Status.SENT and link.last_proof == 0 and sum(port.drops.values()) == 1
        link.engine.receive(port, [unhex(case["good_proof"])], 1000.2)
    assert receipt.status is Status.DELIVERED and link.last_proof > 0 and not link.outstanding
    assert link.state is State.ACTIVE and link.reason is not Reason.TIMEOUT
