"""The transmit ring: counting, wrapping, undoing, completions.  Protocol 09, section 4.3."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rnsfast.osio.ring import Ring, RingBroken

NEAR_WRAP = 0xFFFFFFFD


@pytest.mark.parametrize("start", [0, 5, NEAR_WRAP, 0xFFFFFFFF])
def test_room_when_empty_partly_used_and_full(start: int) -> None:
    ring = Ring(8, start)
    assert (ring.used, ring.free, ring.is_full) == (0, 8, False)
    first = [ring.push() for _ in range(3)]
    assert first == [(start + i) % 8 for i in range(3)]
    assert (ring.used, ring.free, ring.has_room(5), ring.has_room(6)) == (3, 5, True, False)
    for _ in range(5):
        ring.push()
    assert (ring.used, ring.free, ring.is_full, ring.has_room(1)) == (8, 0, True, False)


def test_the_counters_wrap_at_32_bits_and_the_slots_go_on() -> None:
    ring = Ring(8, NEAR_WRAP)
    assert [ring.push() for _ in range(6)] == [5, 6, 7, 0, 1, 2]
    assert (ring.tail, ring.used) == (3, 6)
    ring.reap(6)
    assert (ring.head, ring.used) == (3, 0)


def test_a_full_ring_takes_nothing_and_is_as_it_was_after_an_undo() -> None:
    ring = Ring(4, NEAR_WRAP)
    pushed = [ring.push() for _ in range(4)]
    with pytest.raises(RingBroken):
        ring.push()
    ring.undo()
    assert (ring.used, ring.is_full) == (3, False)
    assert ring.push() == pushed[3]
    assert ring.is_full


def test_undo_across_the_wrap() -> None:
    ring = Ring(4, 0xFFFFFFFF)
    assert (ring.push(), ring.push()) == (3, 0)
    ring.undo()
    ring.undo()
    assert (ring.tail, ring.used) == (0xFFFFFFFF, 0)
    with pytest.raises(RingBroken):
        ring.undo()


def test_more_completions_than_slots_in_use_break_the_ring() -> None:
    ring = Ring(4)
    ring.push()
    with pytest.raises(RingBroken):
        ring.reap(2)
    with pytest.raises(RingBroken):
        ring.settle([0, 1])
    ring.reap(1)
    with pytest.raises(RingBroken):
        ring.reap(1)


@pytest.mark.parametrize("slots", [[2], [-1], [4], [0, 0], [1, 1]])
def test_a_completion_of_a_slot_that_is_not_in_use_breaks_the_ring(slots: list[int]) -> None:
    ring = Ring(4)
    ring.push()
    ring.push()
    with pytest.raises(RingBroken):
        ring.settle(slots)


def test_completions_in_several_portions() -> None:
    ring = Ring(8, NEAR_WRAP)
    slots = [ring.push() for _ in range(8)]
    for portion in (slots[:1], slots[1:4], [], slots[4:]):
        before = ring.free
        ring.settle(portion)
        assert ring.free == before + len(portion)


def test_a_completion_that_overtook_another_frees_nothing_yet() -> None:
    ring = Ring(4)
    slots = [ring.push() for _ in range(4)]
    ring.settle([slots[2], slots[1]])
    assert ring.free == 0  # slot 0 may still be read by the system, and it comes first
    with pytest.raises(RingBroken):
        ring.settle([slots[1]])


def test_the_overtaken_completion_frees_all_of_them() -> None:
    ring = Ring(4)
    for _ in range(4):
        ring.push()
    ring.settle([1, 2])
    ring.settle([0])
    assert (ring.free, ring.push()) == (3, 0)


@pytest.mark.parametrize("size", [0, -4, 3, 12])
def test_the_size_is_a_power_of_two(size: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        Ring(size)


class RingModel(RuleBasedStateMachine):
    """Against two lists: what is in use in order, and what of it has completed."""

    def __init__(self) -> None:
        super().__init__()
        self.ring = Ring(8, NEAR_WRAP)
        self.next = NEAR_WRAP % 8
        self.used: list[int] = []
        self.done: set[int] = set()

    @precondition(lambda self: len(self.used) < 8)
    @rule()
    def push(self) -> None:
        assert self.ring.push() == self.next
        self.used.append(self.next)
        self.next = (self.next + 1) % 8

    @precondition(lambda self: len(self.used) == 8)
    @rule()
    def push_at_full(self) -> None:
        with pytest.raises(RingBroken):
            self.ring.push()

    @precondition(lambda self: self.used and self.used[-1] not in self.done)
    @rule()
    def undo(self) -> None:
        self.ring.undo()
        self.next = self.used.pop()

    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        open_slots = [slot for slot in self.used if slot not in self.done]
        ordered = data.draw(st.booleans())
        count = data.draw(st.integers(0, len(open_slots)))
        slots = open_slots[:count] if ordered else data.draw(st.permutations(open_slots))[:count]
        self.ring.settle(slots)
        self.done |= set(slots)
        while self.used and self.used[0] in self.done:
            self.done.remove(self.used.pop(0))

    @invariant()
    def counts_agree(self) -> None:
        assert self.ring.used == len(self.used)
        assert self.ring.free == 8 - len(self.used)
        assert self.ring.is_full == (len(self.used) == 8)


TestRingModel = RingModel.TestCase
