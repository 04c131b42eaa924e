"""Two gateways over two nodes: traffic, sizes, agreement on one link, access, outages."""

from __future__ import annotations

import contextlib
import logging
from ipaddress import ip_interface

import pytest

from rnsfast import Identity, LinkClosed
from rnsfast.gateway import State, tunnel_hash
from rnsfast.gateway.icmp import too_big
from rnsfast.gateway.messages import Hello, build_control
from tests.gateway.support import ipv4, ipv6
from tests.gateway.tunnel import Tunnel, back, there
from tests.loopback import PATIENCE, Clock, joined, settle

# ------------------------------------------------------------------ traffic


def test_packets_cross_both_ways_in_order(tunnel: Tunnel) -> None:
    one, two = tunnel.up()
    sent = [there(i) for i in range(200)]
    one.device.put(*sent[:100])
    two.device.put(*[back(i) for i in range(50)])
    one.device.put(*sent[100:])
    assert two.device.take(200) == sent
    assert one.device.take(50) == [back(i) for i in range(50)]
    tunnel.settle()
    status = one.gateway.status()
    assert status["state"] == "up" and status["counters"]["out.packets"] == 200 and status["drops"] == {}
    assert two.gateway.status()["counters"]["in.packets"] == 200
    assert status["peer_addresses"] == ["10.77.0.2/24"]


def test_one_drain_of_small_packets_is_one_packet_on_the_link(tunnel: Tunnel) -> None:
    one, two = tunnel.up()
    carried: list[int] = []
    tunnel.pair.to_b.on_carry = lambda packets: carried.append(len(packets))
    with one.node._reactor.lock:  # nothing is read until all are there
        one.device.put(*[there(i) for i in range(64)])
    assert two.device.take(64) == [there(i) for i in range(64)]
    tunnel.settle()
    counters = one.gateway.status()["counters"]
    assert counters["out.packets"] == 64 and counters["out.payloads"] == len(carried) <= 4
    assert set(carried) == {1}


def test_the_device_gets_the_size_that_the_link_carries(tunnel: Tunnel) -> None:
    one, two = tunnel.up()
    assert one.device.mtu == two.device.mtu == 16303 == one.gateway.status()["link_mdu"]
    large = there(1, 16303 - 24)
    one.device.put(large)
    assert two.device.take() == [large]


def test_the_smaller_of_both_bounds_counts_at_both_ends(tunnel: Tunnel) -> None:
    one, two = tunnel.up(a={"mtu": 1400})
    assert one.device.mtu == two.device.mtu == 1400


def test_a_packet_that_is_too_large_is_answered_and_nothing_else_suffers(tunnel: Tunnel) -> None:
    one, two = tunnel.up(a={"mtu": 1000})
    large = there(7, 1500)
    one.device.put(there(1), large, there(2))
    assert two.device.take(2) == [there(1), there(2)]
    assert one.device.take() == [too_big(large, 1000)]
    tunnel.settle()
    assert one.drops == {"out.too_big": 1}


def test_answers_to_packets_that_are_too_large_are_bounded(tunnel: Tunnel) -> None:
    one, _ = tunnel.up(a={"mtu": 1000})
    for _ in range(4):
        one.device.put(*[there(7, 1500)] * 30)
        settle(tunnel.pair.a)
    tunnel.settle()
    assert one.drops == {"out.too_big": 120}
    assert len(one.device.take(50)) == 50 and one.device.is_silent()


def test_what_must_not_pass_is_counted_on_either_side(tunnel: Tunnel) -> None:
    one, two = tunnel.up()
    one.device.put(ipv4("10.77.0.1", "224.0.0.22"), ipv6("fe80::1", "ff02::2"), b"\x45junk")
    one.device.put(ipv4("192.168.9.9", "10.77.0.2"), there(1))
    assert two.device.take() == [there(1)]
    tunnel.settle()
    assert one.drops == {"out.multicast": 1, "out.link_local": 1, "out.header": 1}
    assert two.drops == {"in.source": 1}


def test_payloads_that_no_gateway_makes_are_counted(tunnel: Tunnel) -> None:
    one, two = tunnel.up()
    junk = [b"", b"\x03what", b"\x01\x00\x09short", b"\x02", b"\x02\x63", b"\x01\x00\x2c" + there(1) + b"\x00"]
    one.links.current.link.send_many([*junk, there(2)])
    assert two.device.take(2)[-1] == there(2)
    assert two.drops["in.empty"] == 1 and two.drops["in.type_unknown"] == 1
    assert two.drops["in.bundle"] == 2 and two.drops["in.control"] == 2


def test_a_full_device_loses_packets_and_says_so(tunnel: Tunnel) -> None:
    one, two = tunnel.up()
    for _ in range(30):
        one.device.put(*[there(i, 4000) for i in range(20)])
        settle(tunnel.pair.a)
    tunnel.settle()
    got = 0
    while not two.device.is_silent():
        got += 1
    assert got == two.gateway.in_packets and two.drops["in.device_full"] == 600 - got > 0
    one.device.put(there(1))
    assert two.device.take() == [there(1)]


# ------------------------------------------------------------------ sizes and addresses


def test_ipv6_over_a_link_that_carries_too_little_is_said(caplog: pytest.LogCaptureFixture, clock: Clock) -> None:
    with joined(mtu_discovery=False) as pair:
        tunnel = Tunnel(pair, clock)
        try:
            addresses = ip_interface("10.77.0.1/24"), ip_interface("fd77::1/64")
            one, two = tunnel.up(a={"addresses": addresses})
            assert one.device.mtu == two.device.mtu == 431
            assert (
                "IPv6 needs packets of 1280 bytes and the tunnel carries 431: fd77::1/64 does not work" in caplog.text
            )
        finally:
            tunnel.close()


def test_the_same_address_at_both_ends_is_said(tunnel: Tunnel, caplog: pytest.LogCaptureFixture) -> None:
    tunnel.up(b={"addresses": (ip_interface("10.77.0.1/24"),)})
    assert "both ends of the tunnel have the address 10.77.0.1: give one of them another" in caplog.text


def test_an_address_outside_the_allowed_networks_is_said(tunnel: Tunnel, caplog: pytest.LogCaptureFixture) -> None:
    tunnel.up(b={"addresses": (ip_interface("10.99.0.2/24"),)})
    assert "the peer's address 10.99.0.2 is in none of the networks allowed here: add --route 10.99.0.2" in caplog.text


def test_a_device_that_refuses_its_size_is_said_and_the_tunnel_works(
    tunnel: Tunnel, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = tunnel.make()
    one.device.refuses = True
    one.gateway.start()
    two.gateway.start()
    one.until(State.UP)
    two.until(State.UP)
    assert "the MTU cannot be set" in caplog.text
    one.device.put(there(1))
    assert two.device.take() == [there(1)]


# ------------------------------------------------------------------ one link of two


def test_both_reach_the_other_and_agree_on_one_link(tunnel: Tunnel) -> None:
    one, two = tunnel.up()
    one.device.put(there(1))
    two.device.put(back(1))
    assert two.device.take() == [there(1)] and one.device.take() == [back(1)]


@pytest.mark.parametrize("late", ["first", "second"])
def test_a_link_that_comes_up_later_changes_nothing_for_the_traffic(tunnel: Tunnel, late: str) -> None:
    one, two = tunnel.make()
    wires = [tunnel.pair.to_b, tunnel.pair.to_a]
    for wire in wires:
        wire.hold(lambda raw: raw[0] & 3 == 2)  # link requests
    one.gateway.start()
    two.gateway.start()
    tunnel.pass_time(1.1)
    for wire in wires:
        wire.wait_held(1)
    if late == "first":
        wires.reverse()
    wires[0].flow()
    one.until(State.UP)
    two.until(State.UP)
    wires[1].flow()
    tunnel.agree(one, two)
    one.device.put(there(1))
    two.device.put(back(1))
    assert two.device.take() == [there(1)] and one.device.take() == [back(1)]


def test_the_link_of_the_smaller_address_is_kept_and_nothing_is_lost_meanwhile(tunnel: Tunnel) -> None:
    one, two = tunnel.both_ask()
    tunnel.pair.to_a.flow()
    tunnel.pair.to_b.flow()
    one.until(State.UP)
    two.until(State.UP)
    for i in range(40):
        one.device.put(there(i))
        two.device.put(back(i))
    assert two.device.take(40) == [there(i) for i in range(40)]
    assert one.device.take(40) == [back(i) for i in range(40)]
    tunnel.agree(one, two)
    assert one.links.current.link.is_initiator and not two.links.current.link.is_initiator
    assert one.drops == two.drops == {}


def test_a_bye_that_is_lost_ends_the_other_link_all_the_same(tunnel: Tunnel) -> None:
    one, two = tunnel.both_ask()
    tunnel.pair.to_a.flow()
    one.until(State.CONNECTING)
    tunnel.pair.to_a.drop = lambda raw: raw[0] & 0x0F == 0x0C and len(raw) < 120  # byes and closes of the second
    tunnel.pair.to_b.flow()
    two.until(State.UP)
    tunnel.settle()
    tunnel.pair.to_a.drop = None
    one.until(State.UP)
    tunnel.pass_time(11)
    tunnel.agree(one, two)
    one.device.put(there(1))
    assert two.device.take() == [there(1)]


def test_a_link_the_peer_has_lost_gives_way_to_the_one_it_makes(tunnel: Tunnel) -> None:
    """Even if the lost one was of the end whose links are kept otherwise."""
    one, two = tunnel.both_ask()
    tunnel.pair.to_a.flow()
    tunnel.pair.to_b.flow()
    one.until(State.UP)
    two.until(State.UP)
    tunnel.agree(one, two)
    tunnel.pass_time(6)
    lost = two.links.current.link
    assert one.links.current.link.is_initiator
    tunnel.pair.to_a.drop = lambda raw: raw[2:18] == lost.id  # nobody hears of its end
    lost.close()
    two.until(State.RETRYING)
    two.until(State.UP)
    tunnel.settle()
    one.device.put(there(1))
    assert two.device.take() == [there(1)]
    assert one.links.current.link.id != lost.id
    tunnel.pass_time(6)
    tunnel.agree(one, two)


# ------------------------------------------------------------------ access


def test_who_is_not_allowed_is_closed_counted_and_logged_once_a_minute(
    tunnel: Tunnel, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = tunnel.up()
    two.gateway.close()
    stranger = Identity()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            link = tunnel.pair.b.connect(one.links.own, "rnsfast", "tun", identity=stranger, timeout=PATIENCE)
            assert link.wait_closed(PATIENCE)
    assert one.drops["link.not_allowed"] == 3
    lines = [record for record in caplog.records if "is not allowed" in record.message]
    assert len(lines) == 1 and tunnel_hash(stranger).hex() in lines[0].message
    assert stranger.hash.hex() not in lines[0].message
    tunnel.pass_time(61)
    assert tunnel.pair.b.connect(one.links.own, "rnsfast", "tun", identity=stranger, timeout=PATIENCE).wait_closed(9)
    assert len([record for record in caplog.records if "is not allowed" in record.message]) == 2


def test_packets_of_who_is_not_allowed_reach_no_device(tunnel: Tunnel) -> None:
    one, two = tunnel.up()
    two.gateway.close()
    link = tunnel.pair.b.connect(one.links.own, "rnsfast", "tun", timeout=PATIENCE)
    link.send_many([back(1), build_control(Hello(1, 1500, ())), back(2)])
    link.identify(Identity())
    assert link.wait_closed(PATIENCE)
    tunnel.settle()
    assert one.device.is_silent() and one.gateway.in_packets == 0


def test_who_does_not_say_who_it_is_is_closed_and_the_number_is_bounded(tunnel: Tunnel) -> None:
    one, two = tunnel.up()
    two.gateway.close()
    links = [tunnel.pair.b.connect(one.links.own, "rnsfast", "tun", timeout=PATIENCE) for _ in range(16)]
    with contextlib.suppress(LinkClosed):  # it may be closed before we have it
        assert tunnel.pair.b.connect(one.links.own, "rnsfast", "tun", timeout=PATIENCE).wait_closed(PATIENCE)
    tunnel.settle()
    assert one.drops["link.too_many"] == 1 and all(link.is_active for link in links)
    tunnel.pass_time(15.1)
    tunnel.settle()
    assert not any(link.is_active for link in links) and one.drops["link.unidentified"] == 16


def test_the_peer_that_does_not_allow_us_is_tried_again_with_pauses(tunnel: Tunnel) -> None:
    first, second = tunnel.identities
    one = tunnel.side(tunnel.pair.a, first, "10.77.0.1/24", tunnel_hash(second))
    two = tunnel.side(tunnel.pair.b, second, "10.77.0.2/24", tunnel_hash(Identity()))
    two.gateway.start()
    one.gateway.start()
    assert "closed the link: it may not allow this end" in one.until(State.RETRYING)
    tunnel.pass_time(0.6)  # the peer's announce is worth an attempt
    one.until(State.RETRYING)
    attempts = two.drops["link.not_allowed"]
    assert attempts == 2
    for pause in (2.1, 4.1, 8.1, 10.1, 10.1):
        tunnel.pass_time(pause / 2)
        assert two.drops["link.not_allowed"] == attempts
        tunnel.pass_time(pause / 2)
        one.until(State.RETRYING)
        attempts += 1
        assert two.drops["link.not_allowed"] == attempts


def test_a_further_identity_may_come_in_but_not_beside_the_peer(tunnel: Tunnel) -> None:
    other = Identity()
    one, two = tunnel.up(a={"allow": frozenset((tunnel_hash(other),))})
    link = tunnel.pair.b.connect(one.links.own, "rnsfast", "tun", identity=other, timeout=PATIENCE)
    link.send_many([build_control(Hello(1, 1500, ()))])
    assert link.wait_closed(PATIENCE)
    assert one.drops == {"link.busy": 1}
    two.gateway.close()
    one.until(State.RETRYING)
    third = tunnel.side(tunnel.pair.b, other, "10.77.0.3/24", tunnel_hash(tunnel.identities[0]))
    third.gateway.start()
    third.until(State.UP)
    third.device.put(ipv4("10.77.0.3", "10.77.0.1"))
    assert one.device.take() == [ipv4("10.77.0.3", "10.77.0.1")]


def test_another_version_is_refused_with_a_reason(tunnel: Tunnel, caplog: pytest.LogCaptureFixture) -> None:
    one, two = tunnel.make()
    two.gateway._make_hello = lambda: Hello(2, 1500, ())  # type: ignore[method-assign]
    two.gateway.start()
    one.gateway.start()
    assert "has another version of the gateway" in one.until(State.RETRYING)
    assert one.drops["link.version"] >= 1


def test_the_address_of_something_else_is_no_tunnel(tunnel: Tunnel) -> None:
    inbox = tunnel.pair.b.register(Identity(), "rnsfast", "files")
    one = tunnel.side(tunnel.pair.a, tunnel.identities[0], "10.77.0.1/24", inbox.hash)
    one.gateway.start()
    assert f"{inbox.hash.hex()} is not the address of a tunnel" in one.until(State.FAILED)


def test_the_peer_is_not_ourselves(tunnel: Tunnel) -> None:
    identity = tunnel.identities[0]
    one = tunnel.side(tunnel.pair.a, identity, "10.77.0.1/24", tunnel_hash(identity))
    with pytest.raises(ValueError, match="is the address of this end itself"):
        one.gateway.start()
