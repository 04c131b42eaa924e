"""Proof-of-work stamps. The work blocks of the reference are checked with the discovery announces."""

from __future__ import annotations

import pytest

from rnsfast.crypto.stamp import MAX_COST, SLICE, find_stamp, is_valid, stamp_value, work_block

BLOCK = work_block(bytes(32))


@pytest.mark.parametrize("cost", [0, 1, 8, 12])
def test_stamps_that_are_found_are_worth_what_was_asked(cost: int) -> None:
    stamp = find_stamp(BLOCK, cost)
    assert stamp is not None and len(stamp) == 32
    assert is_valid(BLOCK, stamp, cost) and stamp_value(BLOCK, stamp) >= cost


def test_a_search_can_be_cancelled() -> None:
    looks = iter([False, False, True])
    assert find_stamp(BLOCK, MAX_COST, is_cancelled=lambda: next(looks)) is None
    assert next(looks, None) is None  # after two slices
    assert SLICE < 10_000  # tries a slice, well under 10 ms


def test_another_subject_needs_another_stamp() -> None:
    stamp = find_stamp(BLOCK, 12)
    assert stamp is not None
    assert not is_valid(work_block(b"\x01" * 32), stamp, 12) or not is_valid(work_block(b"\x02" * 32), stamp, 12)


def test_stamps_of_another_length_and_costs_out_of_reach_are_refused() -> None:
    assert not is_valid(BLOCK, bytes(31), 0) and not is_valid(BLOCK, b"", 0)
    with pytest.raises(ValueError, match=r"0\.\.40"):
        find_stamp(BLOCK, MAX_COST + 1)
