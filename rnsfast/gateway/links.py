"""The links of a tunnel: reach the peer, let it in, agree on one link, notice its end, begin again.  docs/tun.md.

Everything but `__init__` runs on the reactor thread. Whatever happens rings; `_look` then sees what is the case and
does what follows from it, so no event can be missed and none comes at a wrong moment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress
from enum import Enum
from functools import partial
from math import inf
from typing import Final

from rnsfast.crypto.identity import Identity
from rnsfast.errors import LinkClosed, NodeClosed
from rnsfast.gateway.dialer import Dialer
from rnsfast.gateway.door import APP, ASPECT, Door
from rnsfast.gateway.end import GREETINGS, PARTING, End
from rnsfast.gateway.lost import Lost
from rnsfast.gateway.messages import (
    BUNDLE,
    CONTROL,
    VERSION,
    Bye,
    Control,
    Hello,
    Ping,
    Pong,
    Reason,
    build_control,
    parse_control,
    unbundle,
)
from rnsfast.node.link import Link
from rnsfast.node.node import Node
from rnsfast.node.reactor import Call

ANNOUNCE_INTERVAL: Final = 1800.0  # seconds
ANNOUNCE_PAUSE: Final = 5.0  # seconds between announces at least, however often interfaces come up
ANNOUNCE_AFTER: Final = 0.5  # seconds from a connection to the announce: a stock client drops one that speaks at once
LEFT: Final[dict[int, str]] = {
    Reason.SHUT_DOWN: "the peer was shut down",
    Reason.BUSY: "the peer has a tunnel with somebody else",
    Reason.VERSION: "the peer has another version of the gateway; update the older",
}
AT_ONCE: Final = 5.0  # seconds between two links that both ends asked for without knowing of the other's
MAX_ENDS: Final = 16  # links of those who are allowed; one is used, and others end as soon as that is agreed


class State(Enum):
    WAITING = "waiting for a path"
    CONNECTING = "connecting"
    UP = "up"
    RETRYING = "retrying"
    FAILED = "failed"
    CLOSED = "closed"


class Links:
    """See the module.

    Args:
        identity: of this end, with its private key.
        peer: the tunnel address to reach.
        allow: further tunnel addresses that may come in.
        hello: makes what this end says of itself.
        deliver: takes IP packets that arrived, not yet checked.
        looked: called after each look, when `current` and its congestion may have changed.
        changed: called with the state and one sentence when they are others than before.
    """

    def __init__(
        self,
        node: Node,
        identity: Identity,
        peer: bytes,
        allow: Collection[bytes],
        lost: Counter[Lost],
        *,
        hello: Callable[[], Hello],
        deliver: Callable[[list[bytes]], None],
        looked: Callable[[], None],
        changed: Callable[[State, str], None],
    ) -> None:
        self._node, self._reactor, self._identity = node, node._reactor, identity
        self._lost, self._hello, self._deliver, self._looked, self._changed = lost, hello, deliver, looked, changed
        self.current: End | None = None  # what packets go out on
        self.ends: list[End] = []  # those let in and those of ours; few, since each replaces another
        self._door = Door((peer, *allow), lost, self._let_in)
        self._serial = 0
        self._rung = False
        self._closed = False
        self._timer: Call | None = None  # for `_timer_at`
        self._timer_at = inf
        self._announce_at, self._announced_at = inf, -inf
        self._ports: frozenset[int] = frozenset()
        self._shown: tuple[State, str] | None = None
        self.inbox = node.register(identity, APP, ASPECT)
        self.own = self.inbox.hash
        self._waiter = node._listener.path_waiter(peer)  # rings for announces of the peer and for interfaces
        self._dialer = Dialer(node, peer, APP, ASPECT)
        self.inbox.on_link(lambda link: self._post(lambda: self._arrive(link)))
        self.ring()

    # ------------------------------------------------------------------ ringing and looking

    def _post(self, call: Callable[[], None]) -> None:
        self._reactor.call_at(0.0, call)

    def ring(self) -> None:
        """Something may have changed. Any thread; never waits."""
        if not self._rung:
            self._rung = True
            self._post(self._look)

    def _look(self) -> None:
        self._rung = False
        if not self._closed:
            with suppress(NodeClosed):
                self._look_around()

    def _look_around(self) -> None:
        reactor = self._reactor
        now = reactor.now()
        with reactor.lock:
            if reactor.closed:
                return
            links = [*self._door.links, *(end.link for end in self.ends), *self._dialer.links]
            for waitable in (self._waiter, *links):
                waitable.watch(self.ring)
            ports = frozenset(id(port) for port in reactor.engine.ports if port.online)
        due = [self._door.judge(now), self._tend(now), self._announce(now, ports)]
        self._choose(now)
        due.append(self._dial(now, ports))
        self._arm(min([*due, *(end.close_at for end in self.ends)]))
        self._looked()
        self._publish()

    def _arm(self, due: float) -> None:
        """Look again at `due` at the latest. A deadline that comes too early finds nothing to do, and sets another."""
        if due < self._timer_at:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_at = due
            self._timer = self._reactor.call_at(due, self._on_timer)

    def _on_timer(self) -> None:
        self._timer, self._timer_at = None, inf
        self.ring()

    def _publish(self) -> None:
        end = self.current
        if end is not None:
            news = State.UP, f"link {end.link.id.hex()} with {end.remote.hex()}, {end.link.mdu} bytes a packet"
        elif self._dialer.fault is not None:
            news = State.FAILED, self._dialer.fault
        else:
            greeting = any(each.link.is_initiator and each.hello is None for each in self.ends)
            news = (State.CONNECTING, self._dialer.connecting) if greeting else self._dialer_state()
        self._show(*news)

    def _show(self, state: State, sentence: str) -> None:
        if (state, sentence) != self._shown:
            self._shown = state, sentence
            self._changed(state, sentence)

    def _dialer_state(self) -> tuple[State, str]:
        dialer = self._dialer
        if dialer.links:
            return State.CONNECTING, dialer.connecting
        if dialer.problem:
            return State.RETRYING, dialer.problem
        return State.WAITING, f"no path to {dialer.peer.hex()} is known yet"

    # ------------------------------------------------------------------ links that others open

    def _arrive(self, link: Link) -> None:
        if self._closed:
            link.close()
        else:
            self._door.arrive(link, self._reactor.now())
            self.ring()

    def _let_in(self, link: Link, remote: bytes) -> None:
        if len(self.ends) >= MAX_ENDS:
            self._lost[Lost.LINK_TOO_MANY] += 1
            link.close()
        else:
            self._add(link, remote, self._reactor.now())

    def _is_busy(self, remote: bytes) -> bool:
        return any(end.is_ready and end.remote != remote for end in self.ends)

    def _refuse(self, end: End, reason: Reason, counter: Lost, now: float, sentence: str) -> None:
        self._lost[counter] += 1
        self._door.log(end.remote, now, sentence)
        self._say(end, Bye(reason))
        self._drop(end, sentence % end.remote.hex(), now)

    def _drop(self, end: End, why: str, now: float) -> None:
        """Close a link before its time; if it was the peer's or ours, the next attempt waits a while."""
        with self._reactor.turn as turn:
            end.link._engine.close(turn, why)
        if end in self.ends:
            self.ends.remove(end)
        if end is self.current:
            self.current = None
        if end.remote == self._dialer.peer:
            self._dialer.failed(why, now)
        self.ring()

    # ------------------------------------------------------------------ links there are

    def _add(self, link: Link, remote: bytes, now: float) -> End:
        self._serial += 1
        end = End(link, remote, self._serial, now)
        self.ends.append(end)
        with self._reactor.lock:
            link.watch(self.ring)
        link._forward_to(partial(self._arrived, end))
        return end

    def _tend(self, now: float) -> float:
        """Say hello where it is due, part with what is over. Returns when to look again."""
        due = inf
        for end in list(self.ends):
            greeting = end.link.is_initiator and end.hello is None
            if end.is_open and now >= end.close_at:
                end.link.close()
            if end.is_open and greeting and now >= end.greet_at:
                if end.greetings < GREETINGS:
                    self._greet(end, now)
                else:
                    end.link.close()
            if not end.is_open:
                self.ends.remove(end)
                if greeting:
                    heard = "did not say hello" if end.greetings >= GREETINGS else "closed the link"
                    self._dialer.failed(f"{end.remote.hex()} {heard}: it may not allow this end", now)
                elif end is self.current:
                    self._dialer.lost(f"the link is closed: {end.link.closing}", now)
                    self._show(State.RETRYING, self._dialer.problem)  # the next attempt may be under way in a moment
            elif greeting:
                due = min(due, end.greet_at)
        return due

    def _greet(self, end: End, now: float) -> None:
        end.greeted(now)
        try:
            end.link.identify(self._identity)
        except LinkClosed:
            return
        self._say(end, self._hello())

    def _say(self, end: End, message: Control) -> None:
        try:
            end.link.send_many([build_control(message)])
        except LinkClosed:
            self.ring()

    def _choose(self, now: float) -> None:
        """The link to send on: of several the one that the smaller address has initiated, and of those the newest."""
        best = max((end for end in self.ends if end.is_ready), key=self._rank, default=None)
        self.current = best
        if best is None:
            return
        for end in self.ends:
            if end is best or end.hello is None:
                continue
            if end.link.is_initiator == best.link.is_initiator and not end.heard_bye:
                end.link.close()  # its initiator has given it up
            elif not end.said_bye and (end.link.is_initiator or end.heard_bye):
                self._part(end, now)
            elif end.said_bye and end.heard_bye and end.link.is_initiator:
                end.link.close()  # nothing is in flight any more

    def _part(self, end: End, now: float) -> None:
        self._say(end, Bye(Reason.OTHER_LINK))
        end.said_bye = True
        end.close_at = now + PARTING
        self.ring()

    def _rank(self, end: End) -> tuple[bool, bool, bool, int]:
        first = self.own if end.link.is_initiator else end.remote
        return not end.heard_bye, not end.doubted, first == min(self.own, end.remote), end.serial

    # ------------------------------------------------------------------ traffic

    def send(self, payloads: list[bytes]) -> bool:
        """Send on the current link. False if there is none that takes them."""
        end = self.current
        if end is None:
            return False
        try:
            end.link.send_many(payloads)
        except LinkClosed:
            self.ring()
            return False
        now = self._reactor.now()
        if end.note_sent(now):
            self._reactor.call_at(now + end.patience, partial(self._probe, end))
        return True

    def _probe(self, end: End) -> None:
        """A deadline, set with the first unanswered packet: is the peer still there?"""
        end.probing = False
        if self._closed or not end.is_open:
            return
        now = self._reactor.now()
        due = end.verdict(now)
        if due is None:
            self._lost[Lost.LINK_SILENT] += 1
            with self._reactor.turn as turn:
                end.link._engine.close(turn, "the peer was silent for too long")
            self.ring()
            return
        if due == 0.0:
            return
        if due <= now:
            self._say(end, Ping(self._reactor.engine.entropy(4)))
            end.pinged_at = now
            due = now + end.patience
        end.probing = True
        self._reactor.call_at(due, partial(self._probe, end))

    def _arrived(self, end: End, payloads: list[bytes]) -> None:
        """What a turn brought on one link."""
        end.heard_at = self._reactor.now()
        if self._closed or not payloads:
            return
        packets: list[bytes] = []
        for payload in payloads:
            first = payload[0] if payload else -1
            if first >> 4 == 4 or first >> 4 == 6:
                packets.append(payload)
            elif first == BUNDLE:
                problem = unbundle(payload, packets)
                if problem is not None:
                    self._lost[problem] += 1
            elif first == CONTROL:
                self._control(end, payload)
            else:
                self._lost[Lost.IN_EMPTY if first < 0 else Lost.IN_TYPE] += 1
        if packets:
            self._deliver(packets)

    def _control(self, end: End, payload: bytes) -> None:
        message = parse_control(payload)
        if isinstance(message, Ping):
            self._say(end, Pong(message.token))
        elif isinstance(message, Hello):
            self._take_hello(end, message)
        elif isinstance(message, Bye):
            end.heard_bye = True
            if message.reason != Reason.OTHER_LINK:
                self._drop(end, LEFT.get(message.reason, "the peer has closed the tunnel"), self._reactor.now())
            self.ring()
        elif message is None:
            self._lost[Lost.IN_CONTROL] += 1

    def _take_hello(self, end: End, hello: Hello) -> None:
        now = self._reactor.now()
        if hello.version != VERSION:
            self._refuse(
                end, Reason.VERSION, Lost.LINK_VERSION, now, "%s has another version of the gateway; update the older"
            )
        elif self._is_busy(end.remote):
            self._refuse(
                end, Reason.BUSY, Lost.LINK_BUSY, now, "link from %s refused: the tunnel is with somebody else"
            )
        else:
            if not end.link.is_initiator:
                self._say(end, self._hello())  # again if it is repeated: ours may have been lost
            if end.hello is None:
                end.hello, end.ready_at, end.close_at = hello, now, inf
                if not end.link.is_initiator:
                    for other in self.ends:  # who has a link that works does not ask for another
                        other.doubted = other.doubted or now >= other.ready_at + AT_ONCE
                self._dialer.succeeded()
        self.ring()

    # ------------------------------------------------------------------ reaching the peer

    def _dial(self, now: float, ports: frozenset[int]) -> float:
        """Open a link if there is none and it is time. Returns when to look again."""
        busy = any(end.is_ready or (end.link.is_initiator and end.hello is None) for end in self.ends)
        link = self._dialer.attend(now, ports, wanted=not busy)
        if link is not None:
            end = self._add(link, self._dialer.peer, now)
            self._greet(end, now)
            return end.greet_at
        if self._dialer.links:
            with self._reactor.lock:
                for each in self._dialer.links:
                    each.watch(self.ring)
                    if not each._engine.is_open or each.is_active:
                        self.ring()  # while we looked elsewhere
        return self._dialer.due

    def _announce(self, now: float, ports: frozenset[int]) -> float:
        if ports - self._ports:
            self._announce_at = min(self._announce_at, max(now + ANNOUNCE_AFTER, self._announced_at + ANNOUNCE_PAUSE))
        self._ports = ports
        if now >= self._announce_at:
            self._announced_at = now
            self._announce_at = now + ANNOUNCE_INTERVAL if self.inbox.announce() else inf
        return self._announce_at

    # ------------------------------------------------------------------ end

    def close(self) -> None:
        """Say bye, close all links, receive no more."""
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for end in self.ends:
            if end.is_open and end.hello is not None:
                self._say(end, Bye(Reason.SHUT_DOWN))
        for link in (*(end.link for end in self.ends), *self._dialer.links):
            link.close()
        self.ends.clear()
        self._door.close()
        self.current = None
        self.inbox.close()
        self._node._listener.drop_path_waiter(self._dialer.peer, self._waiter)
        self._changed(State.CLOSED, "closed")
