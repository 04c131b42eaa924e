"""How long a proof takes on a channel, as measured: what a fast retransmission waits for.  Protocol 05, section 5.3.

The link's own round trip time is that of one handshake on an idle path, and the timeouts of the protocol go by it.
Under load, or where packets overtake each other, a proof takes longer; a sender that does not know it sends everything
twice.
"""

from __future__ import annotations

from typing import Final

FLOOR: Final = 0.010  # seconds waited at least
SMOOTHING: Final = 0.125  # weight of a new measurement; of its deviation twice that
OVERTAKING: Final = 0.25  # of a round trip: what a packet may be late by without having varied before


class RoundTrip:
    """A smoothed measurement and its variation."""

    __slots__ = ("_is_guess", "mean", "patience", "variation")

    def __init__(self, rtt: float) -> None:
        self.mean = rtt  # of the handshake, until there is a measurement
        self.variation = rtt / 2
        self._is_guess = True
        self.patience = max(rtt, FLOOR)  # seconds after which a packet that later ones have overtaken counts as lost

    def measured(self, elapsed: float) -> None:
        """A proof came `elapsed` seconds after its packet was sent."""
        if self._is_guess:
            self._is_guess = False
            self.mean, self.variation = elapsed, elapsed / 2
        else:
            error = elapsed - self.mean
            self.mean += SMOOTHING * error
            self.variation += 2 * SMOOTHING * (abs(error) - self.variation)
        self.patience = max(self.mean + max(4 * self.variation, OVERTAKING * self.mean), FLOOR)
