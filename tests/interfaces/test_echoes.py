"""Own packets that a medium brings back."""

from __future__ import annotations

import socket
import sys
import threading

import pytest

from rnsfast.engine.port import Port
from rnsfast.interfaces import udp as udp_module
from rnsfast.interfaces.common import CommonConfig
from rnsfast.interfaces.echoes import LIFE, LIMIT, Echoes, may_come_back
from rnsfast.interfaces.udp import UdpConfig, UdpInterface
from rnsfast.osio.peers import make_peer
from rnsfast.wire.drop import Drop
from tests.fakes import FakeRuntime


class Bench(Echoes):
    def __init__(self) -> None:
        self.time = 1000.0
        self.port = Port("x")
        super().__init__(lambda: self.time, self.port, threading.Lock())

    @property
    def counted(self) -> int:
        return self.port.drops[Drop.OWN_ECHO]


def test_what_was_sent_is_left_out_once_and_counted() -> None:
    bench = Bench()
    assert bench.remember([b"a", b"b"]) == [b"a", b"b"]
    assert bench.sift([b"x", b"a", b"y"]) == [b"x", b"y"]
    assert bench.sift([b"b"]) == []
    assert bench.counted == 2
    assert bench.sift([b"a", b"b"]) == [b"a", b"b"]  # from somebody else
    assert bench.counted == 2


def test_the_same_bytes_of_two_senders_are_heard_once() -> None:
    bench = Bench()
    bench.remember([b"hello"])
    assert bench.sift([b"hello", b"hello"]) == [b"hello"]


def test_sent_twice_is_left_out_twice() -> None:
    bench = Bench()
    bench.remember([b"hello"])
    bench.remember([b"hello"])
    assert bench.sift([b"hello", b"hello", b"hello"]) == [b"hello"]


def test_what_does_not_come_back_is_forgotten() -> None:
    bench = Bench()
    bench.remember([b"old"])
    bench.time += LIFE + 0.1
    bench.remember([b"new"])
    assert bench.sift([b"old", b"new"]) == [b"old"]


def test_memory_is_bounded() -> None:
    bench = Bench()
    for first in range(0, 3 * LIMIT, 100):
        bench.remember([b"%d" % number for number in range(first, first + 100)])
        assert len(bench._sent) == len(bench._order) <= LIMIT
    assert bench.sift([b"0", b"%d" % (3 * LIMIT)]) == [b"0"]
    bench.remember([b"n%d" % number for number in range(2 * LIMIT)])
    assert len(bench._sent) == len(bench._order) == LIMIT


def test_without_anything_sent_the_list_goes_through_as_it_is() -> None:
    packets = [b"a"]
    assert Bench().sift(packets) is packets


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere everything may come back")
def test_one_to_one_nothing_comes_back() -> None:
    assert not may_come_back(make_peer("127.0.0.1", 4242))


@pytest.mark.parametrize("host", ["255.255.255.255", "127.255.255.255", "224.0.0.1", "ff02::1"])
def test_what_goes_to_many_may_come_back(host: str) -> None:
    assert may_come_back(make_peer(host, 4242))


def test_an_interface_that_hears_itself_delivers_only_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(udp_module, "may_come_back", lambda peer: True)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.bind(("127.0.0.1", 0))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind(("127.0.0.1", 0))
            here = probe.getsockname()
        runtime = FakeRuntime()
        interface = UdpInterface(
            UdpConfig(
                common=CommonConfig(name="x"),
                listen_ip=here[0],
                listen_port=here[1],
                forward_ip=here[0],
                forward_port=here[1],
            )
        )
        interface.start(runtime)
        own = [bytes([number]) * 100 for number in range(70)]
        interface.port.send_many(own)
        interface.flush(interface.port)
        other.sendto(b"other", here)
        runtime.run_until(lambda: runtime.received)
        assert runtime.received == [b"other"]
        assert interface.port.drops == {Drop.OWN_ECHO: 70}
        assert interface.port.tx_packets == 70
        interface.close()
        runtime.close()
