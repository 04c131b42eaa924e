"""Outages, back-pressure, and the ends of gateways, over two nodes."""

from __future__ import annotations

import errno
from typing import Any

from rnsfast.gateway import State, tunnel_hash
from rnsfast.gateway.messages import Ping
from tests.gateway.support import ipv6
from tests.gateway.tunnel import Tunnel, there
from tests.loopback import PATIENCE


def test_a_lost_interface_ends_the_link_and_its_return_makes_a_new_one(tunnel: Tunnel) -> None:
    one, two = tunnel.up()
    before = one.links.current.link.id
    tunnel.pair.end_b.close()
    assert "the link is closed" in one.until(State.RETRYING)
    two.until(State.RETRYING)
    one.device.put(*[there(i) for i in range(5)])
    tunnel.settle()
    assert one.drops == {"out.no_link": 5}  # drained all the same
    tunnel.pass_time(10)
    tunnel.pair.end_b.start(tunnel.pair.b._reactor)
    one.until(State.UP)
    two.until(State.UP)
    tunnel.agree(one, two)
    assert one.links.current.link.id != before
    one.device.put(there(9))
    assert two.device.take() == [there(9)]


def test_a_link_of_another_size_sets_the_device_again(tunnel: Tunnel) -> None:
    one, two = tunnel.up()
    tunnel.pair.end_b.close()
    one.until(State.RETRYING)
    tunnel.pair.end_a._options = tunnel.pair.end_b._options = {"hw_mtu": 1196}
    tunnel.pair.end_a.close()
    tunnel.pair.end_a.start(tunnel.pair.a._reactor)
    tunnel.pair.end_b.start(tunnel.pair.b._reactor)
    one.until(State.UP)
    two.until(State.UP)
    tunnel.agree(one, two)
    assert one.device.sizes == two.device.sizes == [16303, 1119]


def test_a_peer_that_comes_up_later_is_found_by_its_announce(tunnel: Tunnel) -> None:
    one, two = tunnel.make()
    one.gateway.start()
    one.until(State.WAITING)
    tunnel.pass_time(0.6)  # the announce of the interface's coming up
    two.gateway.start()
    two.until(State.UP)
    one.until(State.UP)
    tunnel.agree(one, two)


def test_the_peer_comes_back_after_a_restart(tunnel: Tunnel) -> None:
    one, two = tunnel.up()
    two.gateway.close()
    assert "the peer was shut down" in one.until(State.RETRYING)
    again = tunnel.side(tunnel.pair.b, two.identity, "10.77.0.2/24", tunnel_hash(one.identity))
    again.gateway.start()
    again.until(State.UP)
    one.until(State.UP)
    tunnel.agree(one, again)


def test_an_announce_heard_while_the_tunnel_was_up_is_no_news_when_it_ends(tunnel: Tunnel) -> None:
    one, two = tunnel.up()
    tunnel.pass_time(0.6)
    two.links.inbox.announce()
    tunnel.settle()
    two.gateway.close()
    one.until(State.RETRYING)
    tunnel.settle()
    assert one.news.empty() and one.gateway.state is State.RETRYING


def test_a_request_that_an_interface_swallowed_is_repeated_when_it_is_back(tunnel: Tunnel) -> None:
    one, two = tunnel.make()
    tunnel.pair.to_b.drop = tunnel.pair.to_a.drop = lambda raw: raw[0] & 3 == 2  # link requests
    one.gateway.start()
    two.gateway.start()
    tunnel.pass_time(1.1)
    one.until(State.CONNECTING)
    tunnel.pair.end_b.close()
    assert "the interface that leads to the peer is down" in one.until(State.RETRYING)
    tunnel.pair.to_b.drop = tunnel.pair.to_a.drop = None
    tunnel.pair.end_b.start(tunnel.pair.b._reactor)
    one.until(State.UP)
    two.until(State.UP)
    assert one.device.mtu == 16303  # over a path: a request sent without one offers the smallest packets only
    tunnel.agree(one, two)


def test_a_peer_that_has_silently_gone_is_noticed_ten_seconds_after_a_packet(tunnel: Tunnel) -> None:
    one, two = tunnel.up()
    tunnel.pass_time(30)  # quiet: nothing is sent, nothing suspected
    tunnel.pair.to_a.drop = tunnel.pair.to_b.drop = lambda raw: raw[0] & 0x0C == 0x0C  # everything on links
    one.device.put(there(1))
    tunnel.settle()
    tunnel.pass_time(5.1)
    assert one.gateway.state is State.UP
    tunnel.pass_time(5.1)
    assert "silent for too long" in one.until(State.RETRYING)
    assert one.drops == {"link.silent": 1}
    tunnel.pair.to_a.drop = tunnel.pair.to_b.drop = None
    tunnel.pass_time(15)  # the link request that was under way has its time
    one.until(State.UP)
    tunnel.pass_time(6)
    tunnel.agree(one, two)
    one.device.put(there(2))
    assert two.device.take() == [there(2)]


def test_traffic_in_one_direction_is_answered_by_pongs_and_an_idle_tunnel_is_quiet(tunnel: Tunnel) -> None:
    one, two = tunnel.up()
    for i in range(8):
        one.device.put(there(i))
        assert two.device.take() == [there(i)]
        tunnel.pass_time(2.6)
    assert one.gateway.state is State.UP and one.drops == {}
    tunnel.pass_time(20)
    calls = len(tunnel.pair.a._reactor._calls)
    tunnel.settle()
    wakeups = tunnel.pair.a._reactor.wakeups
    tunnel.settle()
    assert not one.links.current.probing
    assert tunnel.pair.a._reactor.wakeups - wakeups <= 15 and calls < 40  # nothing but what settling takes


def test_a_greeting_that_is_lost_is_repeated(tunnel: Tunnel) -> None:
    one, two = tunnel.make()
    tunnel.pair.to_b.drop = lambda raw: raw[0] & 0x0F == 0x0C and raw[18] in (0x00, 0xFB)  # data, identity
    two_starts = two.gateway.start
    one.gateway.start()
    tunnel.pass_time(0.1)
    tunnel.pair.to_a.drop = lambda raw: raw[0] & 3 == 2  # the second's own requests
    two_starts()
    tunnel.pass_time(0.6)  # announces
    one.until(State.CONNECTING)
    tunnel.pass_time(1)
    tunnel.pair.to_b.drop = None
    for _ in range(4):
        tunnel.pass_time(1)
    one.until(State.UP)
    two.until(State.UP)


# ------------------------------------------------------------------ back-pressure, device


def congest(side: Any, value: bool) -> None:
    port = side.links.current.link._engine.port
    with side.node._reactor.lock:
        port.congested = value
    side.node._reactor.changed(port)


def test_while_the_interface_is_behind_the_device_is_not_read(tunnel: Tunnel) -> None:
    one, two = tunnel.up()
    congest(one, True)
    tunnel.settle()
    assert one.gateway.status()["congested"]
    one.device.put(*[there(i) for i in range(10)])
    tunnel.settle()
    assert one.gateway.out_packets == 0 and two.device.is_silent()
    congest(one, False)
    assert two.device.take(10) == [there(i) for i in range(10)]
    assert one.drops == {}


def test_congestion_that_our_own_sending_causes_stops_the_reading(tunnel: Tunnel) -> None:
    one, two = tunnel.up()
    port = one.links.current.link._engine.port
    tunnel.pair.to_b.on_carry = lambda packets: setattr(port, "congested", True)
    one.device.put(there(1))
    assert two.device.take() == [there(1)]
    tunnel.settle()
    one.device.put(there(2))
    tunnel.settle()
    assert one.gateway.out_packets == 1
    tunnel.pair.to_b.on_carry = None
    congest(one, False)
    assert two.device.take() == [there(2)]


def test_a_link_lost_while_the_interface_was_behind_leaves_the_device_drained(tunnel: Tunnel) -> None:
    one, _ = tunnel.up()
    congest(one, True)
    tunnel.settle()
    tunnel.pair.end_b.close()
    one.until(State.RETRYING)
    one.device.put(there(1), there(2))
    tunnel.settle()
    assert one.drops == {"out.no_link": 2} and not one.gateway.status()["congested"]


def test_a_device_that_is_gone_is_the_end_with_a_sentence(tunnel: Tunnel) -> None:
    one, two = tunnel.up()

    def broken(fd: int, count: int, budget: int) -> tuple[list[bytes], int]:
        return [], errno.EBADFD

    one.device.io._calls.read_many = broken  # type: ignore[method-assign]
    one.device.put(there(1))
    assert "the device tun-10.77.0.1/24 is gone" in one.until(State.FAILED)
    assert one.device.closed.wait(PATIENCE)
    assert "the peer was shut down" in two.until(State.RETRYING)
    assert one.gateway.status()["state"] == "failed"


def test_closing_says_goodbye_and_leaves_nothing_behind(tunnel: Tunnel) -> None:
    one, two = tunnel.up()
    one.gateway.close()
    one.gateway.close()
    assert one.until(State.CLOSED) == "closed" and one.device.closed.is_set()
    two.until(State.RETRYING)
    tunnel.settle()
    assert not tunnel.pair.a._engine.links and not tunnel.pair.a._engine.destinations
    assert not tunnel.pair.a._listener._path_waiters


def test_closing_after_the_node_was_stopped_and_stopping_under_a_gateway_are_fine(tunnel: Tunnel) -> None:
    one, two = tunnel.up()
    tunnel.pair.a.stop()
    one.gateway.close()
    two.until(State.RETRYING)
    assert one.device.closed.is_set()


def test_a_ping_is_answered(tunnel: Tunnel) -> None:
    _one, two = tunnel.up()
    end = two.links.current
    before = end.heard_at
    two.links._say(end, Ping(b"abcd"))
    tunnel.settle()
    assert end.heard_at > before


def test_what_no_link_would_take_is_not_counted_as_lost_for_want_of_one(tunnel: Tunnel) -> None:
    one, _ = tunnel.make()
    one.gateway.start()
    one.device.put(there(1), b"\x45 no packet", ipv6("fe80::1", "ff02::2", b"router?"))
    tunnel.settle()
    assert one.drops == {"out.no_link": 1, "out.header": 1, "out.link_local": 1}


def test_a_request_without_an_answer_is_not_blamed_on_the_interface(tunnel: Tunnel) -> None:
    one, two = tunnel.make()
    tunnel.pair.to_b.drop = tunnel.pair.to_a.drop = lambda raw: raw[0] & 3 == 2  # link requests
    one.gateway.start()
    two.gateway.start()
    tunnel.pass_time(20)
    assert one.until(State.RETRYING) == f"{two.links.own.hex()} did not answer the link request"
