"""How many messages of a channel may be unproved.  Protocol 05, sections 5.3 and 6."""

from __future__ import annotations

from typing import Final

FAST_RTT: Final = 0.18  # seconds, inclusive; local, the reference's value, as all below
MEDIUM_RTT: Final = 0.75  # seconds, inclusive
SLOW_RTT: Final = 1.45  # seconds, inclusive
MAX_SLOW: Final = 5
MAX_MEDIUM: Final = 12
MAX_FAST: Final = 48  # never more: the receiver's span ends there
MIN_SLOW: Final = 2
MIN_MEDIUM: Final = 5
MIN_FAST: Final = 16
FLEXIBILITY: Final = 4
ROUNDS: Final = 10  # deliveries before a faster tier is entered

TRIES: Final = 5  # transmissions of one message, then the link is torn down
MIN_TIMEOUT: Final = 0.025  # seconds, of 2.5 round trips
BACKOFF: Final = 1.5


def timeout(tries: int, rtt: float, outstanding: int) -> float:
    """Seconds that transmission number `tries` is given while `outstanding` messages are unproved."""
    return float(BACKOFF ** (tries - 1) * max(rtt * 2.5, MIN_TIMEOUT) * (outstanding + 1.5))


class Window:
    """The sender's window. Grows by one with each proof, shrinks by one with each counted timeout."""

    __slots__ = ("fast_rounds", "flexibility", "maximum", "medium_rounds", "minimum", "size")

    def __init__(self, rtt: float) -> None:
        if rtt > SLOW_RTT:
            self.size = self.maximum = self.minimum = self.flexibility = 1
        else:
            self.size, self.maximum, self.minimum, self.flexibility = 2, MAX_SLOW, MIN_SLOW, FLEXIBILITY
        self.fast_rounds = 0
        self.medium_rounds = 0

    def delivered(self, rtt: float) -> None:
        """A proof freed an envelope."""
        if self.size < self.maximum:
            self.size += 1
        if rtt == 0:
            return
        if rtt <= FAST_RTT:
            self.fast_rounds += 1
            if self.fast_rounds == ROUNDS and self.maximum < MAX_FAST:
                self.maximum, self.minimum = MAX_FAST, MIN_FAST
            return
        self.fast_rounds = 0
        if rtt > MEDIUM_RTT:
            self.medium_rounds = 0
            return
        self.medium_rounds += 1
        if self.medium_rounds == ROUNDS and self.maximum < MAX_MEDIUM:
            self.maximum, self.minimum = MAX_MEDIUM, MIN_MEDIUM

    def timed_out(self) -> None:
        """A counted timeout leads to a retransmission."""
        if self.size > self.minimum:
            self.size -= 1
            if self.maximum > self.minimum + self.flexibility:
                self.maximum -= 1
