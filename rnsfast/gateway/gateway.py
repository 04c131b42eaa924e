"""A gateway: packets of a TUN device to the link with the peer, and back.  docs/tun.md, Gateway mode.

Everything that moves packets runs on the node's reactor thread, between one reading of the device, or one turn of the
node, and one sending: no thread is woken on the way and nothing waits.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from rnsfast.crypto.identity import Identity
from rnsfast.gateway.device import IPV6_MTU
from rnsfast.gateway.door import tunnel_hash
from rnsfast.gateway.icmp import Bucket, too_big
from rnsfast.gateway.ip import Gate, Network
from rnsfast.gateway.links import Links, State
from rnsfast.gateway.lost import Lost
from rnsfast.gateway.messages import MAX_PACKET, Address, Hello, bundle
from rnsfast.node.node import Node
from rnsfast.osio.contract import BatchIO, IOBroken, IOClosed, TxState
from rnsfast.osio.device import DeviceError
from rnsfast.osio.poller import READ

log = logging.getLogger(__name__)

CLOSE_WITHIN: Final = 5.0  # seconds `close` waits for the reactor


class Device(Protocol):
    """What a gateway needs of a TUN device beside its packets. May raise DeviceError."""

    @property
    def name(self) -> str:
        """As the system calls it."""

    @property
    def mtu(self) -> int:
        """Bytes of the largest packet, now."""

    def set_mtu(self, mtu: int) -> None: ...

    def close(self) -> None:
        """Idempotent; closes the descriptor of the packets, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """One end of a tunnel.  docs/tun.md."""

    identity: Identity  # of this end, with its private key
    peer: bytes  # tunnel address of the other end, 16 bytes
    addresses: tuple[Address, ...]  # of this end inside the tunnel
    routes: tuple[Network, ...] = ()  # further networks behind the peer
    allow: frozenset[bytes] = frozenset()  # further tunnel addresses that may come in
    mtu: int | None = None  # bytes of the largest packet; None takes what a link carries


class Gateway:
    """Runs from `start` to `close`.

    Args:
        node: a running node.
        io: the device's packets; can be polled.
        device: its other side. Both are closed with the gateway.
        on_change: called with the state and one sentence, on the reactor thread: it must not wait.

    Raises ValueError: the tunnel address of this identity is registered on the node already, or is the peer's.
    """

    def __init__(
        self,
        node: Node,
        io: BatchIO,
        device: Device,
        config: GatewayConfig,
        *,
        on_change: Callable[[State, str], None] = lambda state, sentence: None,
    ) -> None:
        if not io.caps.pollable:
            raise ValueError(f"{io.caps.backend}: a gateway needs a device that can be polled")
        self.node, self.device, self.config = node, device, config
        self.state = State.WAITING
        self.lost: Counter[Lost] = Counter()
        #: Sent on the link, received on it and written to the device: IP packets, their bytes.
        self.out_packets = self.out_bytes = self.in_packets = self.in_bytes = 0
        self.out_payloads = 0
        self._io, self._fd = io, io.fileno()
        self._batch = io.make_batch()
        self._reactor = node._reactor
        self._on_change = on_change
        self._gate = Gate(config.addresses, config.routes, self.lost)
        self._answers = Bucket()
        self._links: Links | None = None
        self._limit = 0  # bytes of the largest packet that goes out, 0 without a link
        self._size = self._mdu = 0
        self._paused = False
        self._closed = False
        self.is_device_gone = False  # under us: then the gateway has closed itself
        self._warned = ""

    def start(self) -> Gateway:
        """Begin to reach the peer and to forward."""
        if tunnel_hash(self.config.identity) == self.config.peer:
            raise ValueError(f"{self.config.peer.hex()} is the address of this end itself: the peer has another")
        self._links = Links(
            self.node,
            self.config.identity,
            self.config.peer,
            self.config.allow,
            self.lost,
            hello=self._make_hello,
            deliver=self._to_device,
            looked=self._on_look,
            changed=self._changed,
        )
        self._reactor.watch(self._fd, READ, self._on_readable)
        return self

    def close(self) -> None:
        """Tell the peer, close link and device. Idempotent; not from the reactor thread unless it need not wait."""
        if self._closed:
            return
        if self._reactor.is_mine(threading.current_thread()) or not self.node.is_running:
            self._close()
            return
        done = threading.Event()

        def end() -> None:
            self._close()
            done.set()

        self._reactor.call_at(0.0, end)
        if not done.wait(CLOSE_WITHIN):
            self._close()

    def _close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._reactor.unwatch(self._fd)
        try:
            if self._links is not None:
                self._links.close()
        finally:
            self._io.close()
            self.device.close()

    def __enter__(self) -> Gateway:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.close()

    def status(self) -> dict[str, Any]:
        """State, sizes and counters. Any thread."""
        end = None if self._links is None else self._links.current
        stats = self._io.stats
        return {
            "state": self.state.value,
            "peer": self.config.peer.hex(),
            "device": self.device.name,
            "mtu": self._limit or None,
            "link": None if end is None else end.link.id.hex(),
            "link_mdu": None if end is None else end.link.mdu,
            "peer_addresses": [] if end is None or end.hello is None else [str(a) for a in end.hello.addresses],
            "backend": self._io.caps.backend,
            "batch": self._io.caps.max_rx,
            "congested": self._paused,
            "counters": {
                "out.packets": self.out_packets,
                "out.bytes": self.out_bytes,
                "out.payloads": self.out_payloads,
                "in.packets": self.in_packets,
                "in.bytes": self.in_bytes,
                "device.rx_calls": stats.rx_calls,
                "device.tx_calls": stats.tx_calls,
            },
            "drops": {reason.value: count for reason, count in list(self.lost.items()) if count},
        }

    # ------------------------------------------------------------------ device to link

    def _on_readable(self, events: int) -> None:
        """Take what is there, send it on together. Without a link it is dropped: the device never fills up."""
        try:
            count = self._io.recv(self._batch)
        except (IOClosed, IOBroken) as error:
            self._device_gone(error)
            return
        if not count:
            return
        links, limit = self._links, self._limit
        large: list[bytes] = []
        if links is None or links.current is None:  # what no link would have taken is counted as that
            self.lost[Lost.OUT_NO_LINK] += len(self._gate.leaving(self._batch.take_all(), MAX_PACKET, large))
            return
        packets = self._gate.leaving(self._batch.take_all(), limit, large)
        if packets:
            payloads = bundle(packets, self._mdu)
            if links.send(payloads):
                self.out_packets += len(packets)
                self.out_bytes += sum(map(len, packets))
                self.out_payloads += len(payloads)
            else:
                self.lost[Lost.OUT_NO_LINK] += len(packets)
        if large:
            self._answer(large, limit)
        self._look_at_congestion()

    def _answer(self, packets: list[bytes], limit: int) -> None:
        now = self._reactor.now()
        answers = [
            answer for packet in packets if self._answers.take(now) and (answer := too_big(packet, limit)) is not None
        ]
        if answers:
            self._io.send(answers)

    def _look_at_congestion(self) -> None:
        """While the interface is behind, the kernel's queue fills, and drops."""
        end = None if self._links is None else self._links.current
        paused = end is not None and end.is_congested
        if paused != self._paused and not self._closed:
            self._paused = paused
            self._reactor.rewatch(self._fd, 0 if paused else READ)

    def _device_gone(self, error: OSError) -> None:
        if self._closed:
            return
        self.is_device_gone = True
        self._changed(State.FAILED, f"the device {self.device.name} is gone ({error.strerror or error})")
        self._close()

    # ------------------------------------------------------------------ link to device

    def _to_device(self, packets: list[bytes]) -> None:
        good = self._gate.arriving(packets)
        if not good or self._closed:
            return
        result = self._io.send(good)
        self.in_packets += result.sent
        if result.sent == len(good):
            self.in_bytes += sum(map(len, good))
            return
        refused = {index for index, _ in result.rejected}
        self.in_bytes += sum(len(p) for i, p in enumerate(good[: result.taken]) if i not in refused)
        self.lost[Lost.IN_DEVICE_REFUSED] += len(refused)
        if result.state is TxState.BLOCKED:
            self.lost[Lost.IN_DEVICE_FULL] += len(good) - result.taken
        elif result.state is not TxState.DONE:
            self.lost[Lost.IN_DEVICE_REFUSED] += len(good) - result.taken
            if result.state is TxState.BROKEN:
                self._device_gone(OSError(result.errno, "writing failed"))

    # ------------------------------------------------------------------ sizes and states

    def _make_hello(self) -> Hello:
        return Hello(1, min(self.config.mtu or MAX_PACKET, MAX_PACKET), self.config.addresses)

    def _on_look(self) -> None:
        """The link in use, or its interface, may be another."""
        end = None if self._links is None else self._links.current
        if end is None or end.hello is None:
            self._limit = 0
        else:
            self._mdu = end.link.mdu
            limit = min(self._mdu, self.config.mtu or MAX_PACKET, end.hello.mtu or MAX_PACKET, MAX_PACKET)
            if limit != self._size:
                self._set_size(limit)
            self._limit = limit
            self._check_peer(end.hello)
        self._look_at_congestion()

    def _set_size(self, limit: int) -> None:
        self._size = limit
        try:
            if self.device.mtu != limit:
                self.device.set_mtu(limit)
        except DeviceError as error:
            log.warning("%s", error)
        modern = [str(address) for address in self.config.addresses if address.version == 6]
        if modern and limit < IPV6_MTU:
            log.warning(
                "%s: IPv6 needs packets of %d bytes and the tunnel carries %d: %s does not work over this link",
                self.device.name, IPV6_MTU, limit, ", ".join(modern),
            )  # fmt: skip

    def _check_peer(self, hello: Hello) -> None:
        """Say once what cannot work."""
        ours, theirs = {a.ip for a in self.config.addresses}, {a.ip for a in hello.addresses}
        problem = ""
        if same := ours & theirs:
            problem = f"both ends of the tunnel have the address {min(map(str, same))}: give one of them another"
        elif outside := [a.ip for a in hello.addresses if a.ip.packed not in self._gate.allowed]:
            problem = (
                f"the peer's address {outside[0]} is in none of the networks allowed here: add --route {outside[0]}"
            )
        if problem != self._warned:
            self._warned = problem
            if problem:
                log.warning("%s", problem)

    def _changed(self, state: State, sentence: str) -> None:
        if self.state is State.FAILED and state is State.CLOSED:
            return
        self.state = state
        if state is State.UP:
            sentence = f"{sentence}, device {self.device.name} MTU {self._size}"
        self._on_change(state, sentence)
