"""Field case F2 between two nodes of ours, in virtual time: links on which one side speaks, or nobody."""

from __future__ import annotations

import pytest

from rnsfast.engine.linkstate import Reason, State
from rnsfast.wire.packet import CTX_KEEPALIVE
from tests.virtualnet import VirtualNet, Wire

SECONDS = 90


def pings(wire: Wire) -> int:
    return sum(raw[18] == CTX_KEEPALIVE for raw in wire.sent)


@pytest.mark.parametrize("speaker", ["initiator", "responder", "nobody"])
def test_a_link_on_which_one_side_speaks_stays_and_loses_nothing(speaker: str) -> None:
    net = VirtualNet(11)
    link, peer, there, back = net.linked(delay=0.002)
    ends = {"initiator": (link, net.nodes[1]), "responder": (peer, net.nodes[0])}
    for _ in range(SECONDS):
        if speaker in ends:
            assert ends[speaker][0].send_data(bytes(100), net.now) is not None
        net.run(1.0)
    assert link.state is State.ACTIVE and peer.state is State.ACTIVE
    if speaker in ends:
        assert len(ends[speaker][1].recorder.named("link_data")) == SECONDS
    assert pings(there) >= SECONDS / 5 - 2  # the initiator pings also while it only receives, or only sends
    assert pings(back) == pings(there)  # and every ping is answered


def test_a_connection_that_swallows_everything_ends_both_ends_with_the_timeout_reason_once() -> None:
    net = VirtualNet(12)
    link, peer, there, back = net.linked(delay=0.002)
    there.cut = back.cut = True
    began = net.now
    net.run(20.0, lambda: peer.state is State.CLOSED)
    assert 10 <= net.now - began <= 16 and link.state is State.ACTIVE
    net.run(80.0, lambda: link.state is State.CLOSED)
    assert 60 <= net.now - began <= 76
    assert link.reason is Reason.TIMEOUT and peer.reason is Reason.TIMEOUT
    assert [len(node.recorder.named("link_closed")) for node in net.nodes] == [1, 1]
