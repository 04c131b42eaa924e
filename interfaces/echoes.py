"""Our own packets, on a medium that brings them back: broadcast and multicast.  Protocol 06, section 7.

The engine's filter knows the hashes of what it sent to everybody, but channel packets pass it, and both ends of a link
have the same keys: our own message, heard again, would be taken for the peer's with the same number, and proved.
"""

from __future__ import annotations

import ipaddress
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

from rnsfast.engine.port import Port
from rnsfast.osio.contract import Peer
from rnsfast.wire.drop import Drop

LIFE: Final = 2.0  # seconds until a packet that did not come back is forgotten; local
LIMIT: Final = 4096  # packets remembered


class Echoes:
    """What was sent lately. Each packet takes away one equal one that is received: the same bytes may have two senders.

    Args:
        now: monotonic seconds.
        port: where echoes are counted, under `lock`.
        lock: the node's lock.
    """

    def __init__(self, now: Callable[[], float], port: Port, lock: AbstractContextManager[Any]) -> None:
        self._now, self._port, self._node_lock = now, port, lock
        self._lock = threading.Lock()
        self._sent: dict[bytes, int] = {}  # how often; at most LIMIT
        self._order: deque[tuple[float, bytes]] = deque()

    def remember(self, packets: list[bytes]) -> list[bytes]:
        """These are being sent."""
        now, sent, order = self._now(), self._sent, self._order
        with self._lock:
            while order and (order[0][0] < now - LIFE or len(order) + len(packets) > LIMIT):
                self._forget(order.popleft()[1])
            for packet in packets[-LIMIT:]:
                sent[packet] = sent.get(packet, 0) + 1
                order.append((now, packet))
        return packets

    def sift(self, packets: list[bytes]) -> list[bytes]:
        """Those of the received packets that are not ours."""
        sent = self._sent
        if not sent:
            return packets
        others: list[bytes] = []
        with self._lock:
            for packet in packets:
                if packet in sent:
                    self._forget(packet)
                else:
                    others.append(packet)
        if len(others) < len(packets):
            with self._node_lock:
                self._port.drops[Drop.OWN_ECHO] += len(packets) - len(others)
        return others

    def _forget(self, packet: bytes) -> None:
        """Once less, if it is known."""
        times = self._sent.get(packet, 0)
        if times > 1:
            self._sent[packet] = times - 1
        elif times:
            del self._sent[packet]


def may_come_back(peer: Peer) -> bool:
    """Whether what is sent there may be received by ourselves. Only a clear no is one."""
    if ipaddress.ip_address(peer.host).is_multicast:
        return True
    if sys.platform != "linux":
        return True  # nothing to ask
    with socket.socket(peer.family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(peer.address)  # sends nothing; a broadcast address is refused to a socket like this one
        except OSError:
            return True
    return False
