"""What an interface may pour in: frequencies, bursts, announces that are held.  Protocol 02, section 8.5."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import inf
from typing import Final

from rnsfast.engine.port import Port

SAMPLES: Final = 48
FORGET: Final = 10.0  # seconds; an older sample goes, one for each look
FEWEST: Final = 3  # samples that make a frequency
CHECK: Final = 5.25  # seconds between looks at what is held: a release is due after more than five
MAX_HELD_HOPS: Final = 127  # announces that came this far are not held
CLEAN_LOOKS: Final = (
    4  # looks in a row without excess that end a burst of path requests: three, and one that finds the end
)


class Frequency:
    """Events per second, over the last 48."""

    __slots__ = ("_times",)

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=SAMPLES)

    def note(self, now: float) -> None:
        """One more."""
        self._times.append(now)

    def rate(self, now: float, extra: int = 0) -> float:
        """Per second. `extra` events that are about to happen count too."""
        times = self._times
        if times and now - times[0] > FORGET:
            times.popleft()
        count = len(times) + extra
        if count < FEWEST or not times:
            return 0.0
        span = now - times[0]
        return count / span if span > 0 else inf


class Burst:
    """Too many for a while. Begins at once, ends late."""

    __slots__ = ("_clean", "_looks", "_over_at", "active", "began_at")

    def __init__(self, looks: int = 1) -> None:
        self.active = False
        self.began_at = 0.0
        self._over_at = 0.0
        self._looks, self._clean = looks, 0

    def look(self, rate: float, threshold: float, hold: float, penalty: float, now: float) -> bool:
        """Whether it is one, at this frequency. The look that finds the end is still one of it."""
        if not self.active:
            if rate > threshold:
                self.active, self.began_at, self._over_at, self._clean = True, now, now, 0
            return self.active
        if rate >= threshold:
            self._over_at, self._clean = now, 0
        elif now > self.began_at + hold and now > self._over_at + penalty:
            self._clean += 1
            if self._clean >= self._looks:
                self.active = False
        return True


@dataclass(slots=True)
class Held:
    """An announce that waits for the end of a burst."""

    raw: bytes
    hops: int  # as on the wire


class Intake:
    """One interface's side of it."""

    __slots__ = (
        "announce_burst", "announces", "checked_at", "held", "outgoing_requests", "port", "released_at",
        "request_burst", "requests", "since",
    )  # fmt: skip

    def __init__(self, port: Port, now: float) -> None:
        self.port = port
        self.since = now
        self.announces, self.requests = Frequency(), Frequency()
        self.outgoing_requests = Frequency()
        self.announce_burst, self.request_burst = Burst(), Burst(CLEAN_LOOKS)
        self.held: dict[bytes, Held] = {}  # by destination, at most ic_max_held_announces
        self.released_at = -inf
        self.checked_at = now

    def _threshold(self, new: float, old: float, now: float) -> float:
        return new if now - self.since < self.port.policy.ic_new_time else old

    def is_announce_burst(self, now: float) -> bool:
        """Look; an announce was just counted, or time has passed."""
        policy = self.port.policy
        if not policy.ingress_control:
            return False
        threshold = self._threshold(policy.ic_burst_freq_new, policy.ic_burst_freq, now)
        return self.announce_burst.look(
            self.announces.rate(now), threshold, policy.ic_burst_hold, policy.ic_burst_penalty, now
        )

    def is_request_burst(self, now: float) -> bool:
        """The same for path requests."""
        policy = self.port.policy
        if not policy.ingress_control:
            return False
        threshold = self._threshold(policy.ic_pr_burst_freq_new, policy.ic_pr_burst_freq, now)
        return self.request_burst.look(
            self.requests.rate(now), threshold, policy.ic_burst_hold, policy.ic_burst_penalty, now
        )

    def is_egress_limited(self, now: float) -> bool:
        """Whether a path request for others must not go out now."""
        policy = self.port.policy
        return policy.egress_control and self.outgoing_requests.rate(now, extra=1) > policy.ec_pr_freq

    def hold(self, destination: bytes, raw: bytes) -> bool:
        """Keep an announce for later, the newest of each destination. False if it is not held."""
        hops = raw[1]
        if hops >= MAX_HELD_HOPS:
            return False
        if destination not in self.held and len(self.held) >= self.port.policy.ic_max_held_announces:
            return True  # no room: it is lost
        self.held[destination] = Held(raw, hops)
        return True

    def release(self, now: float) -> bytes | None:
        """At a check: the announce that may go on now, that with the fewest hops."""
        self.checked_at = now
        policy = self.port.policy
        burst = self.announce_burst
        rate = self.announces.rate(now)
        threshold = self._threshold(policy.ic_burst_freq_new, policy.ic_burst_freq, now)
        if policy.ingress_control:
            burst.look(rate, threshold, policy.ic_burst_hold, policy.ic_burst_penalty, now)
        if not self.held or now < burst.began_at + policy.ic_burst_hold or rate >= threshold:
            return None
        if now < self.released_at + policy.ic_held_release_interval:
            return None
        self.released_at = now
        destination = min(self.held, key=lambda d: self.held[d].hops)
        return self.held.pop(destination).raw

    @property
    def due(self) -> float:
        """When to check again; infinity if there is nothing to check."""
        busy = self.held or self.announce_burst.active or self.request_burst.active
        return self.checked_at + CHECK if busy else inf
