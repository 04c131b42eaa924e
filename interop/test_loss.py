"""Streams and messages between our node and a stock peer past a proxy that loses, repeats and swaps frames."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from interop.harness import workspace
from interop.ours import (
    ROLES,
    Collector,
    Duo,
    Role,
    Side,
    drain,
    duo,
    join,
    pour,
    send_messages,
    take_messages,
)
from interop.proxy import Frame, Lane, is_channel, is_packet_proof
from interop.seeded import data, digest, series_digest

OFF = {"link_mtu_discovery": False}


def longest_stall(way: str, rtt: float) -> float:
    """Seconds without a frame.

    A full ring of the reference times out after 1.2 s, later if the round trip at the start was a slow one (protocol
    05, section 2), and is looked at once a second; ours repeats what is lost as soon as later messages are proved.
    """
    return 1.0 if way == "to the peer" else 1.3 + 49.5 * max(2.5 * rtt, 0.025)


def is_channel_or_proof(frame: Frame) -> bool:
    return is_channel(frame) or is_packet_proof(frame)


def lanes(pair: Duo) -> dict[str, Lane]:
    return {"ours": pair.from_us, "stock": pair.from_stock}


def to_peer(pair: Duo, role: Role, size: int, timeout: float, before: Any = None) -> float:
    """Our stream to the peer, byte-exact. `before` is called when the link is up. Returns the sender's round trip."""
    content = data("random", "loss", size)
    joint = join(pair, role, stock={"readers": [1]})
    if before is not None:
        before()
    pour(joint.link.open_writer(1, compression="never"), content, timeout)
    got = joint.stock("received", stream=1, timeout=timeout)
    assert got["eof"] and (got["size"], got["sha256"]) == (size, digest(content))
    assert joint.link.is_active
    joint.link.close()
    return joint.link.rtt


def from_peer(pair: Duo, role: Role, size: int, timeout: float, before: Any = None) -> float:
    readers: list[Any] = []
    joint = join(pair, role, ours=lambda link: readers.append(link.open_reader(1)))
    if before is not None:
        before()
    answer = joint.stock_begin("write", stream=1, size=size, seed="loss", timeout=timeout)
    assert drain(readers[0], timeout) == (size, digest(data("random", "loss", size)))
    answer()
    assert joint.link.is_active
    rtt: float = joint.stock("link_info")["rtt"]
    joint.link.close()
    return rtt


WAY = {"to the peer": to_peer, "from the peer": from_peer}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAY)
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("ours", ["listener", "connector"])
@pytest.mark.parametrize("fraction", [0.01, 0.05])
def test_streams_are_complete_under_loss(fraction: float, ours: Side, role: Role, way: str) -> None:
    size = 400_000 if fraction < 0.02 else 100_000
    with workspace() as space, duo(space, ours=ours, our_node=OFF, stock_node=OFF, proxied=True) as pair:

        def lose() -> None:
            for lane in lanes(pair).values():
                lane.drop_match, lane.drop_fraction = is_channel_or_proof, fraction

        WAY[way](pair, role, size, 28, lose)
        dropped = [lane.counts["dropped"] for lane in lanes(pair).values()]
        assert all(dropped), dropped


@pytest.mark.slow
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("fraction", [0.01, 0.05])
def test_messages_are_complete_under_loss_both_ways(fraction: float, role: Role) -> None:
    count = 600 if fraction < 0.02 else 150
    with workspace() as space, duo(space, proxied=True) as pair:
        collector = Collector()
        joint = join(pair, role, stock={"channel": {}}, ours=take_messages(collector))
        for lane in lanes(pair).values():
            lane.drop_match, lane.drop_fraction = is_channel_or_proof, fraction
        answer = joint.stock_begin("message", count=count, size=50, timeout=28)
        send_messages(joint.link, count, 50, timeout=28)
        assert joint.stock("messages", count=count, timeout=28)["sha256"] == series_digest("m", count, 50)
        assert collector.wait(count, 28) == series_digest("m", count, 50)
        answer()


FAULTS = ["lost data", "lost proof", "repeated data", "repeated proof", "swapped data", "swapped proofs"]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAY)
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("mtu", ["discovered", "500"])
@pytest.mark.parametrize("ours", ["listener", "connector"])
def test_one_fault_at_full_speed_stalls_nobody(ours: Side, mtu: str, role: Role, way: str) -> None:
    """One frame of a thousand, well inside the transfer."""
    narrow = OFF if mtu == "500" else {}
    size = 400_000 if mtu == "500" else 9_000_000
    with workspace() as space, duo(space, ours=ours, our_node=narrow, stock_node=narrow, proxied=True) as pair:
        data_lane, proof_lane = lanes(pair)["ours"], lanes(pair)["stock"]
        if way == "from the peer":
            data_lane, proof_lane = proof_lane, data_lane
        for fault in FAULTS:
            what, where = fault.split()
            lane, match = (data_lane, is_channel) if where == "data" else (proof_lane, is_packet_proof)
            plan = {"lost": lane.drop_nth, "repeated": lane.repeat_nth, "swapped": lane.swap_nth}[what]
            times: list[float] = []
            before = lane.counts.copy()

            def strike(
                lane: Lane = data_lane, times: list[float] = times, plan: Any = plan, match: Any = match
            ) -> None:
                lane.watch(lambda frame: is_channel(frame) and bool(times.append(frame.at)))
                plan(match, 200)

            rtt = WAY[way](pair, role, size, 25, strike)
            done = {"lost": "dropped", "repeated": "duplicated", "swapped": "held"}[what]
            assert (lane.counts - before)[done] == 1, (fault, lane.counts)
            assert len(times) > 500
            stall = max(later - earlier for earlier, later in pairwise(times))
            assert stall < longest_stall(way, rtt), (fault, stall, rtt)
