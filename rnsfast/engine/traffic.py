"""What an interface carried of one kind of packet, counted apart: announces, path requests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Traffic:
    """Packets and bytes in both directions, access codes not counted."""

    rx_packets: int = 0
    rx_bytes: int = 0
    tx_packets: int = 0
    tx_bytes: int = 0

    def received(self, size: int) -> None:
        """One more."""
        self.rx_packets += 1
        self.rx_bytes += size

    def sent(self, size: int) -> None:
        """One more."""
        self.tx_packets += 1
        self.tx_bytes += size
