"""One link of a tunnel: whether it carries traffic, and whether somebody is still there.  docs/tun.md."""

from __future__ import annotations

from math import inf
from typing import Final

from rnsfast.gateway.messages import Hello
from rnsfast.node.link import Link

GREETINGS: Final = 5  # hellos without an answer; then the link is given up
GREETING_PAUSE: Final = 1.0  # seconds to the second hello, or three round trips; each further pause is twice as long
RESPONDER_PATIENCE: Final = 60.0  # seconds a responder waits for the hello
PARTING: Final = 5.0  # seconds from our bye to the end of a link, if the peer says none
SILENCE: Final = 5.0  # seconds: an unanswered packet brings a ping, an unanswered ping the end
SILENCE_RTT_FACTOR: Final = 4.0  # or that many round trips
INTERFACE_QUEUE: Final = 256 << 10  # bytes that may wait in an interface before it says that it is behind


class End:
    """One end of one link. Moments are in the reactor's seconds."""

    __slots__ = (
        "close_at", "doubted", "greet_at", "greetings", "heard_at", "heard_bye", "hello", "link", "pinged_at",
        "probing", "ready_at", "remote", "said_bye", "serial", "unanswered_since",
    )  # fmt: skip

    def __init__(self, link: Link, remote: bytes, serial: int, now: float) -> None:
        self.link = link
        self.remote = remote  # the tunnel address of who is at the other end
        self.serial = serial  # later ones are larger
        self.hello: Hello | None = None  # the peer's; with it the link carries traffic
        self.ready_at = inf  # when that came
        self.said_bye = self.heard_bye = False
        self.doubted = False  # the peer has made another since, so it has probably lost this one
        self.greetings = 0
        self.greet_at = now if link.is_initiator else inf
        self.close_at = inf if link.is_initiator else now + RESPONDER_PATIENCE
        self.heard_at = now
        self.unanswered_since = self.pinged_at = 0.0
        self.probing = False  # a deadline is set

    @property
    def is_open(self) -> bool:
        return self.link._engine.is_open

    @property
    def is_ready(self) -> bool:
        """Both ends have agreed to use it, and this end may send."""
        return self.hello is not None and not self.said_bye and self.is_open

    @property
    def is_congested(self) -> bool:
        """Its interface is behind with sending."""
        return self.link._engine.port.congested

    @property
    def patience(self) -> float:
        """Seconds of silence that mean something: what waits in the interface must have had time to leave."""
        queued = 2 * 8 * INTERFACE_QUEUE / max(1, self.link._engine.port.bitrate)
        return max(SILENCE, SILENCE_RTT_FACTOR * self.link.rtt, queued)

    def greeted(self, now: float) -> None:
        """One more hello has been sent."""
        self.greet_at = now + max(GREETING_PAUSE, 3 * self.link.rtt) * 2**self.greetings
        self.greetings += 1

    def note_sent(self, now: float) -> bool:
        """A packet was sent: true if it is the first that nothing has answered and no deadline is set."""
        if self.unanswered_since > self.heard_at:
            return False
        self.unanswered_since = now
        first, self.probing = not self.probing, True
        return first

    def verdict(self, now: float) -> float | None:
        """What the silence says: 0 nothing, None the peer is gone, else when to look again.

        A ping is due if `pinged_at` is before `unanswered_since` and the moment returned is now.
        """
        if self.unanswered_since <= self.heard_at:
            return 0.0
        if self.pinged_at < self.unanswered_since:
            return max(now, self.unanswered_since + self.patience)
        due = self.pinged_at + self.patience
        return None if now >= due and not self.is_congested else max(due, now + SILENCE if now >= due else due)
