"""Messages beyond the span of a receiver: kept without a proof until the gap before them closes.  Protocol 05, 4.1.

A sender without the range rule, with one message lost, has up to 47 others unproved that are too far ahead.  It repeats
all 48 at once and in any order; those that come before the lost one would cost another of its timeouts each time.
"""

from __future__ import annotations

import random

import pytest

from rnsfast.wire.drop import Drop
from rnsfast.wire.packet import packet_hash
from tests.engine.test_channel_vectors import Receiving


def proved(proofs: list[bytes]) -> set[bytes]:
    """The hashes of the packets."""
    return {proof[19:51] for proof in proofs}


@pytest.mark.parametrize("start", [0, 65500])
@pytest.mark.parametrize("seed", range(5))
def test_one_repetition_of_everything_closes_the_gap_whatever_comes_first(start: int, seed: int) -> None:
    receiving = Receiving(start)
    sequences = [(start + n) % 65536 for n in range(96)]
    within, beyond = sequences[1:49], sequences[49:96]
    assert receiving.give(*map(receiving.packet, within))[0] == []
    assert receiving.give(*map(receiving.packet, beyond)) == ([], [])
    again = [sequences[0], *beyond]
    random.Random(seed).shuffle(again)
    copies = [receiving.packet(sequence) for sequence in again]
    delivered, proofs = [], []
    for copy in copies:
        more, signed = receiving.give(copy)
        delivered += more
        proofs += signed
    assert delivered == sequences and receiving.channel.next_rx == (start + 96) % 65536
    assert proved(proofs) >= {packet_hash(copy) for copy in copies}  # the newest copy is what counts
    assert not receiving.channel.held and not receiving.channel.beyond


def test_what_comes_within_the_span_is_proved_and_held() -> None:
    receiving = Receiving(0)
    far, further = receiving.packet(49), receiving.packet(51)
    assert receiving.give(far, further) == ([], [])
    delivered, proofs = receiving.give(receiving.packet(0))  # 1 is next: 49 is within, 51 not yet
    assert delivered == [0] and packet_hash(far) in proved(proofs) and len(proofs) == 2
    assert list(receiving.channel.held) == [49] and list(receiving.channel.beyond) == [51]


def test_no_more_is_kept_than_a_sender_can_have_unproved() -> None:
    receiving = Receiving(0)
    receiving.give(*(receiving.packet(sequence) for sequence in (95, 96, 1000, 32767)))
    assert list(receiving.channel.beyond) == [95]
    assert receiving.port.drops[Drop.CHANNEL_TOO_FAR] == 4


def test_nothing_is_kept_of_a_channel_that_is_closed() -> None:
    receiving = Receiving(0)
    receiving.give(receiving.packet(60))
    receiving.channel.close()
    assert not receiving.channel.beyond
