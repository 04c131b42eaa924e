"""What a link between our node and a stock peer looks like on the wire, recorded and read back.

`interop/transcripts/` holds one recording for each role of ours. They are made by `pytest interop/test_transcripts.py
--record`; without that option a fresh recording goes to a temporary directory, and both are read.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from interop.harness import HERE, free_port, workspace
from interop.ours import Collector, Role, drain, duo, join, pour, send_messages, take_messages
from interop.proxy import FrameProxy, is_link_close
from interop.seeded import data, digest, series_digest
from rnsfast.wire.announce import Announce, parse_announce
from rnsfast.wire.drop import Drop
from rnsfast.wire.handshake import LinkProof, LinkRequest, parse_link_proof, parse_link_request
from rnsfast.wire.packet import (
    ANNOUNCE,
    CTX_CHANNEL,
    CTX_LINKCLOSE,
    CTX_LRPROOF,
    CTX_LRRTT,
    CTX_NONE,
    DATA,
    LINK,
    LINKREQUEST,
    PROOF,
    Packet,
    build_packet,
    link_id,
    packet_hash,
    parse_packet,
)

RECORDED = {
    "initiator": HERE / "transcripts" / "initiator.jsonl",
    "responder": HERE / "transcripts" / "responder.jsonl",
}
SIZE = 3000


def record(role: Role, path: Path) -> None:
    """A handshake, three messages each way, a stream each way with its end, our close; small at MTU 500."""
    off = {"link_mtu_discovery": False}
    proxy = FrameProxy(free_port(), transcript=path)
    with workspace() as space, duo(space, ours="connector", our_node=off, stock_node=off, proxied=proxy) as pair:
        collector, readers = Collector(), []

        def prepare(link: Any) -> None:
            take_messages(collector)(link)
            readers.append(link.open_reader(2))

        closed = pair.from_us.watch(is_link_close)
        joint = join(pair, role, stock={"channel": {}, "readers": [1]}, ours=prepare)
        send_messages(joint.link, 3, 50)
        assert joint.stock("messages", count=3)["sha256"] == series_digest("m", 3, 50)
        joint.stock("message", count=3, size=50)
        assert collector.wait(3) == series_digest("m", 3, 50)
        pour(joint.link.open_writer(1, compression="never"), data("random", "transcript", SIZE))
        assert joint.stock("received", stream=1)["size"] == SIZE
        answer = joint.stock_begin("write", stream=2, kind="text", seed="transcript", size=SIZE, tries=4)
        assert drain(readers[0]) == (SIZE, digest(data("text", "transcript", SIZE)))
        answer()
        joint.link.close()
        assert closed.wait(10)
        joint.expect("closed")


def frames(path: Path) -> list[tuple[str, bytes, Packet]]:
    """Direction, bytes and packet of each frame; every one must be readable and build back to the same bytes."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        raw = bytes.fromhex(row["frame"])
        packet = parse_packet(raw)
        assert isinstance(packet, Packet), (packet, row)
        assert build_packet(packet) == raw and row["fate"] == "passed"
        found.append((row["dir"], raw, packet))
    return found


def check(role: Role, path: Path) -> None:
    """Our node is the one that connected: what it sends goes `to_target`."""
    ours, stock = "to_target", "to_client"
    asks, answers = (ours, stock) if role == "initiator" else (stock, ours)
    rows = frames(path)
    requests = [(way, raw, packet) for way, raw, packet in rows if packet.flags & 3 == LINKREQUEST]
    assert [way for way, _, _ in requests] == [asks]
    read = parse_link_request(requests[0][2].data)
    assert isinstance(read, LinkRequest) and read.mtu in (None, 500)
    link = link_id(requests[0][1])

    on_link = [(way, raw, packet) for way, raw, packet in rows if packet.destination == link]
    first, second = on_link[0], on_link[1]
    assert (first[0], first[2].flags & 3, first[2].context) == (answers, PROOF, CTX_LRPROOF)
    assert isinstance(parse_link_proof(first[2].data), LinkProof)
    assert (second[0], second[2].flags & 3, second[2].context) == (asks, DATA, CTX_LRRTT)
    last = on_link[-1]
    assert (last[0], last[2].context, len(last[1])) == (ours, CTX_LINKCLOSE, 99)

    contexts = Counter((way, packet.context) for way, _, packet in on_link if packet.flags & 3 == DATA)
    assert contexts[ours, CTX_CHANNEL] >= 3 + SIZE // 423 and contexts[stock, CTX_CHANNEL] >= 3 + 1
    for way, other in ((ours, stock), (stock, ours)):  # every channel packet is proved by the other side, and no other
        sent = {packet_hash(raw) for w, raw, p in on_link if w == way and p.context == CTX_CHANNEL}
        proofs = [p for w, _, p in on_link if w == other and p.flags & 3 == PROOF and p.context == CTX_NONE]
        assert {proof.data[:32] for proof in proofs} == sent
        assert all((proof.flags >> 2) & 3 == LINK and len(proof.data) == 96 for proof in proofs)
    announces = [parse_announce(packet) for _, _, packet in rows if packet.flags & 3 == ANNOUNCE]
    assert announces and all(isinstance(one, Announce) for one in announces)
    assert not any(isinstance(packet, Drop) for _, _, packet in rows)


@pytest.mark.parametrize("role", RECORDED)
def test_the_recorded_transcript_reads_as_it_should(role: Role) -> None:
    check(role, RECORDED[role])


@pytest.mark.parametrize("role", RECORDED)
def test_a_fresh_transcript_reads_like_the_recorded_one(
    role: Role, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path = RECORDED[role] if request.config.getoption("--record") else tmp_path / "transcript.jsonl"
    record(role, path)
    check(role, path)
