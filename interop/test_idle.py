"""Links on which one side speaks, or nobody, or nothing gets through any more: field case F2, with a stock peer.

The situations run side by side on links of one connection, for longer than a link of this round trip may be silent.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from time import monotonic
from typing import Any

import pytest

from interop.harness import workspace
from interop.ours import LIMIT, ROLES, Collector, Duo, Joint, Role, duo, join
from interop.proxy import is_keepalive
from rnsfast import Link, Reason, State

LENGTHS = [22, pytest.param(90, marks=[pytest.mark.soak, pytest.mark.timeout(180)])]


QUICK = 0.02  # seconds: up to this round trip a link has the shortest times, keepalive 5 s and stale after 10 s


def quick(pair: Duo, role: Role, ours: Callable[[Link], Any] | None = None) -> Joint:
    """A link that measured a short round trip in its handshake; a busy machine now and then spoils one."""
    for _ in range(20):
        joint = join(pair, role, ours=ours)
        if max(joint.link.rtt, joint.stock("link_info")["rtt"]) <= QUICK:
            return joint
        joint.link.close()
    raise AssertionError("the machine is too busy: no link with a round trip under 20 ms")


def packet(number: int) -> bytes:
    return number.to_bytes(4, "big") + bytes(96)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", LENGTHS)
def test_links_live_whoever_speaks(seconds: int) -> None:
    """One packet a second from the destination, from the initiator, from nobody; our node in either role."""
    pace = threading.Event()  # never set: a packet a second is the input, nothing is waited for
    with workspace() as space, duo(space, proxied=True) as pair:
        pings = {role: pair.from_us.watch(is_keepalive) for role in ROLES}
        links: dict[tuple[Role, str], tuple[Joint, Collector]] = {}
        for role in ROLES:
            for speaker in ("we", "peer", "nobody"):
                collector = Collector()
                joint = quick(pair, role, lambda link, to=collector: link.on_packet(to.packet))
                links[role, speaker] = joint, collector
        for number in range(seconds):
            pace.wait(1.0)
            for (_, speaker), (joint, _) in links.items():
                if speaker == "we":
                    joint.link.send(packet(number))
                elif speaker == "peer":
                    pair.peer.begin("link_send", link=joint.id, data=packet(number).hex())
        for (role, speaker), (joint, collector) in links.items():
            where = f"{role}, {speaker} spoke"
            if speaker == "we":
                got = pair.peer.collect("link_packet", seconds, link=joint.id)
                assert [event["data"] for event in got] == [packet(n).hex() for n in range(seconds)], where
            elif speaker == "peer":
                collector.wait(seconds)
            assert joint.link.state is State.ACTIVE, where
            assert joint.stock("link_info")["status"] == "active", where
        assert all(event.is_set() for event in pings.values())


@pytest.mark.slow
@pytest.mark.parametrize("seconds", LENGTHS)
def test_an_idle_node_hardly_wakes_up(seconds: int) -> None:
    with workspace() as space, duo(space) as pair:
        joints = [quick(pair, role) for role in ROLES]
        before = pair.node.status()["wakeups"]
        threading.Event().wait(seconds)  # the input: nobody speaks for that long
        spent = pair.node.status()["wakeups"] - before
        assert all(joint.link.state is State.ACTIVE for joint in joints)
        assert spent < 5 * seconds, f"{spent} wake-ups in {seconds} s"


def silence(pair: Duo) -> tuple[dict[Role, Joint], dict[Role, queue.SimpleQueue[Link]]]:
    """A link in each role, and then nothing gets through any more while the connection stays."""
    assert pair.proxy is not None
    told: dict[Role, queue.SimpleQueue[Link]] = {role: queue.SimpleQueue() for role in ROLES}
    joints = {role: quick(pair, role, lambda link, to=told[role]: link.on_close(to.put)) for role in ROLES}
    pair.proxy.swallow()
    return joints, told


@pytest.mark.slow
def test_a_silent_connection_ends_links_in_time() -> None:
    """Keepalive 5 s, stale after 10 s, and at most 5 s more until the end: our responder and the peer."""
    with workspace() as space, duo(space, proxied=True) as pair:
        began = monotonic()
        joints, told = silence(pair)
        assert joints["responder"].link.wait_closed(LIMIT)
        assert 10 < monotonic() - began < 20
        assert joints["responder"].link.reason is Reason.TIMEOUT
        for joint in joints.values():
            assert joint.expect("closed", timeout=LIMIT)["reason"] == "timeout"
        assert told["responder"].get(timeout=LIMIT) is joints["responder"].link and told["responder"].empty()


@pytest.mark.soak
@pytest.mark.timeout(180)
def test_a_silent_connection_ends_an_initiators_link_after_a_minute() -> None:
    """Our initiator waits longer than the reference: 60 s until stale, and at most 10 s more until the end."""
    with workspace() as space, duo(space, proxied=True) as pair:
        began = monotonic()
        joints, told = silence(pair)
        assert joints["initiator"].link.wait_closed(90)
        assert 60 < monotonic() - began < 80
        assert joints["initiator"].link.reason is Reason.TIMEOUT
        assert told["initiator"].get(timeout=LIMIT) is joints["initiator"].link and told["initiator"].empty()
