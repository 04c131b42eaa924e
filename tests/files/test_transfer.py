"""Whole transfers between two nodes, and the ways they end."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rnsfast import Identity, LinkClosed, NodeClosed, PathNotFound
from rnsfast.files import (
    Interrupted,
    NotAReceiver,
    NotStored,
    Outcome,
    OutcomeUnknown,
    ProtocolFault,
    Refused,
    Sender,
    SourceFault,
    TransferError,
    open_source,
    sender,
)
from rnsfast.files.messages import Accept, Digest, Offer, Refuse, Result
from tests.files.support import Bench, Memory, OddReceiver, bench, random_bytes, whole
from tests.loopback import PATIENCE, Pair, Worker, is_message, is_proof


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Bench]:
    with bench(tmp_path / "in") as made:
        yield made


def run(bench: Bench, source: Any, **options: Any) -> tuple[Sender, Worker]:
    made = bench.sender(source, **options)
    return made, Worker(made.run, PATIENCE)


# ------------------------------------------------------------------ that succeed


@pytest.mark.parametrize("size", [0, 1, 425, 16384, 1_000_000, 3_000_001])
@pytest.mark.parametrize("known", [True, False])
def test_a_file_arrives_whole(here: Bench, size: int, known: bool) -> None:
    data = random_bytes(size)
    outcome = here.send(Memory(data, size=size if known else None))
    digest = hashlib.sha256(data).digest()
    assert (outcome.size, outcome.sha256, outcome.saved_as) == (size, digest, "a.bin")
    report = here.report()
    assert (report.ok, report.size, report.sha256, report.saved_as) == (True, size, digest, "a.bin")
    assert (here.inbox / "a.bin").read_bytes() == data


def test_a_second_file_of_the_same_name_gets_a_number(here: Bench) -> None:
    assert here.send(whole(b"one")).saved_as == "a.bin"
    assert here.send(whole(b"two")).saved_as == "a (1).bin"
    assert (here.inbox / "a.bin").read_bytes() == b"one"
    assert (here.inbox / "a (1).bin").read_bytes() == b"two"


def test_transfers_run_side_by_side(here: Bench) -> None:
    gate = threading.Barrier(4)
    data = [random_bytes(300_000, seed) for seed in range(4)]
    runs = [
        run(here, Memory(d[:1000], lambda: gate.wait(PATIENCE), d[1000:], size=len(d), name=f"{i}"))[1]
        for i, d in enumerate(data)
    ]
    for worker in runs:
        worker.result()
    assert [(here.inbox / f"{i}").read_bytes() for i in range(4)] == data


@pytest.mark.parametrize("compression", ["auto", "always"])
def test_compression_is_told_apart_from_size(here: Bench, compression: Any) -> None:
    data = b"the same line again and again\n" * 130_000
    outcome = here.send(whole(data), compression=compression)
    assert outcome.size == len(data)
    assert 0 < outcome.carried < len(data) // 10
    assert here.progress[-1].size == len(data)


def test_a_file_of_the_file_system_is_sent_under_its_name(here: Bench, tmp_path: Path) -> None:
    path = tmp_path / "some report.pdf"
    path.write_bytes(random_bytes(100_000))
    source = open_source(str(path))
    assert here.send(source).saved_as == "some report.pdf"
    source.close()


# ------------------------------------------------------------------ progress


@pytest.mark.parametrize("data", [b"", random_bytes(2_000_000), b"line\n" * 400_000], ids=["empty", "random", "text"])
def test_progress_never_falls_and_reaches_one_once_confirmed(here: Bench, data: bytes) -> None:
    here.send(whole(data))
    fractions = [progress.fraction or 0.0 for progress in here.progress]
    assert fractions == sorted(fractions)
    assert [fraction == 1.0 for fraction in fractions] == [False] * (len(fractions) - 1) + [True]
    assert {progress.size for progress in here.progress} == {len(data)}
    assert [progress.confirmed for progress in here.progress].count(True) == 1


def test_progress_stays_below_one_until_the_receiver_has_spoken(here: Bench) -> None:
    data = random_bytes(200_000)
    seen = threading.Event()
    made = Sender(here.pair.a, here.receiver.hash, whole(data), on_progress=lambda p: watch(p))

    def watch(progress: Any) -> None:
        here.progress.append(progress)
        if progress.sent == len(data):
            seen.set()

    here.pair.to_a.hold(is_proof)
    worker = Worker(made.run, PATIENCE)
    here.pair.to_a.wait_held(1)  # the proof of the offer
    here.pair.to_a.flow()
    assert seen.wait(PATIENCE)
    assert all((p.fraction or 0) < 1 for p in here.progress if not p.confirmed)
    worker.result()
    assert here.progress[-1].fraction == 1.0


def test_the_size_of_standard_input_is_not_made_up(here: Bench) -> None:
    here.send(Memory(random_bytes(100_000), size=None))
    assert {progress.fraction for progress in here.progress} == {None, 1.0}


# ------------------------------------------------------------------ what the sender's side does wrong


@pytest.mark.parametrize(
    ("pieces", "found"),
    [((b"abc", b"d"), "then more"), ((b"a",), "then 1"), ((), "then 0")],
    ids=["grew", "shrank", "gone"],
)
def test_a_file_that_changes_its_size_is_an_error_that_says_so(here: Bench, pieces: Any, found: str) -> None:
    with pytest.raises(SourceFault, match=f"^a.bin changed its size while it was sent: it had 3 bytes, {found}$"):
        here.send(Memory(*pieces, size=3))
    report = here.report()
    assert not report.ok and str(report.reason).startswith("the link ended before the whole file was here")
    assert here.files() == []


def test_a_read_error_is_an_error_that_says_so(here: Bench) -> None:
    def fail() -> None:
        raise SourceFault("a.bin cannot be read: input/output error")

    with pytest.raises(SourceFault, match="input/output error"):
        here.send(Memory(b"abc", fail, size=5))
    assert not here.report().ok
    assert here.files() == []


def test_a_sender_that_vanishes_leaves_nothing(here: Bench) -> None:
    stopper = Worker(lambda: None)

    def vanish() -> None:
        nonlocal stopper
        here.pair.to_b.drop = lambda raw: True  # not even the close arrives
        stopper = Worker(here.pair.end_a.close)
        stopper.join()

    with pytest.raises(TransferError, match="the link to the receiver ended after"):
        here.send(Memory(random_bytes(100_000), vanish, b"x" * 100, size=100_100))
    report = here.report()
    assert (report.ok, report.accepted) == (False, True)
    assert here.files() == []


def test_cancelling_ends_the_transfer_and_leaves_nothing(here: Bench) -> None:
    reached = threading.Event()
    go_on = threading.Event()
    source = Memory(random_bytes(1000), reached.set, lambda: go_on.wait(PATIENCE), b"rest", size=1004)
    made, worker = run(here, source)
    assert reached.wait(PATIENCE)
    made.cancel()
    go_on.set()
    with pytest.raises(Interrupted, match=r"interrupted after 1,000 bytes: the receiver keeps nothing"):
        worker.result()
    assert not here.report().ok
    assert here.files() == []


def test_cancelling_wakes_a_read_of_a_pipe(here: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    source = open_source(f"/dev/fd/{reader}")
    assert source.size is None
    os.write(writer, b"abc")
    arrived = threading.Event()
    made = Sender(here.pair.a, here.receiver.hash, source, on_progress=lambda p: arrived.set() if p.sent == 3 else None)
    worker = Worker(made.run, PATIENCE)
    assert arrived.wait(PATIENCE)
    made.cancel()
    with pytest.raises(Interrupted):
        worker.result()
    source.close()
    os.close(reader)
    os.close(writer)


def test_stopping_the_node_ends_a_search_for_a_path(here: Bench) -> None:
    made = Sender(here.pair.a, bytes(16), whole(b"x"))
    here.pair.to_b.hold()
    worker = Worker(made.run, 60.0)
    here.pair.to_b.wait_held(1)  # the path request
    made.cancel()
    here.pair.a.stop()
    with pytest.raises(Interrupted, match="before anything was sent"):
        worker.result()
    with pytest.raises(NodeClosed):
        Sender(here.pair.a, bytes(16), whole(b"x")).run(1.0)


def test_an_address_nobody_knows_is_not_found(here: Bench) -> None:
    with pytest.raises(PathNotFound):
        Sender(here.pair.a, bytes(16), whole(b"x")).run(0.01)


def test_an_address_of_something_else_is_no_receiver(here: Bench) -> None:
    other = here.pair.b.register(Identity(), "example", "other")
    with pytest.raises(NotAReceiver, match="no address of a file receiver"):
        Sender(here.pair.a, other.hash, whole(b"x")).run(PATIENCE)


# ------------------------------------------------------------------ refusals


def test_only_those_on_the_list_may_send(tmp_path: Path) -> None:
    friend, stranger = Identity(), Identity()
    with bench(tmp_path / "in", allow=[friend.hash]) as here:
        with pytest.raises(Refused, match="is not on the list"):
            here.send(whole(b"x"), identity=stranger)
        report = here.report()
        assert (report.ok, report.accepted, report.peer) == (False, False, stranger.hash)
        assert here.send(whole(b"x"), identity=friend).saved_as == "a.bin"
        assert here.report().peer == friend.hash


def test_a_sender_that_does_not_identify_is_refused_by_a_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rnsfast.files.reception.IDENTITY_WITHIN", 0.01)
    with bench(tmp_path / "in", allow=[bytes(16)]) as here:
        with pytest.raises(Refused, match="did not identify itself"):
            here.send(whole(b"x"))
        assert here.files() == []


def test_a_file_beyond_the_limit_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    with bench(tmp_path / "in", max_size=10) as here:
        with pytest.raises(Refused, match="11 bytes are more than the 10 taken here"):
            here.send(whole(b"x" * 11))
        with pytest.raises(NotStored, match="more than 10 bytes came"):
            here.send(Memory(b"x" * 11, size=None))
        assert here.send(whole(b"x" * 10)).size == 10


def test_a_file_larger_than_the_disk_is_refused(here: Bench) -> None:
    with pytest.raises(Refused, match="the disk has no room for"):
        here.send(Memory(size=2**62))


def test_more_transfers_than_allowed_are_refused_until_one_has_ended(tmp_path: Path) -> None:
    with bench(tmp_path / "in", max_transfers=1) as here:
        begun, go_on = threading.Event(), threading.Event()
        _, worker = run(here, Memory(b"a", begun.set, lambda: go_on.wait(PATIENCE), b"b", size=2))
        assert begun.wait(PATIENCE)
        with pytest.raises(Refused, match="as many transfers run here as can"):
            here.send(whole(b"x"))
        go_on.set()
        worker.result()
        assert here.report().accepted is False
        assert here.report().ok
        assert here.send(whole(b"x")).size == 1


def test_more_links_than_allowed_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rnsfast.files.receiver.MAX_LINKS", 1)
    with bench(tmp_path / "in") as here, here.talk() as first:
        first.send(Offer("a", 3))
        first.expect(Accept, PATIENCE, "answer")
        with suppress(LinkClosed), here.talk() as second:  # it may be closed before `connect` has returned it
            assert second.link.wait_closed(PATIENCE)
        assert first.link.is_active


@pytest.mark.parametrize("name", ["../x", "/etc/x", "..", "", "a\0b", "a\\b", "\x1b]0;x\x07", "x" * 201, " x"])
def test_a_hostile_name_is_refused_and_nothing_is_made(here: Bench, tmp_path: Path, name: str) -> None:
    with here.talk() as talk:
        talk.send(Offer(name, 3))
        assert isinstance(talk.next(PATIENCE, "answer"), Refuse)
    assert here.files() == []
    assert os.listdir(tmp_path) == ["in"]


def test_another_version_is_refused_by_number(here: Bench) -> None:
    with here.talk() as talk:
        talk.send(Offer("a", 3, v=2))
        assert talk.expect(Refuse, PATIENCE, "answer").reason == "version 2 is not known here"


def test_an_offer_that_cannot_be_read_is_refused(here: Bench) -> None:
    class Broken(Offer):
        def pack(self) -> bytes:
            return b"\x80"

    with here.talk() as talk:
        talk.send(Broken())
        assert "without a proper v" in talk.expect(Refuse, PATIENCE, "answer").reason


def test_a_second_offer_is_refused_and_the_first_goes_on(here: Bench) -> None:
    with here.talk() as talk:
        talk.send(Offer("a", 3))
        talk.expect(Accept, PATIENCE, "answer")
        talk.send(Offer("b", 3))
        assert talk.expect(Refuse, PATIENCE, "answer").reason == "one file a link"
        with talk.link.open_writer(1) as writer:
            writer.write(b"abc")
        talk.send(Digest(3, hashlib.sha256(b"abc").digest()))
        assert talk.expect(Result, PATIENCE, "result").ok
    assert here.files() == ["a"]


def test_offers_without_end_close_the_link(here: Bench) -> None:
    with here.talk() as talk:
        for _ in range(10):
            if talk.link.is_active:
                try:
                    talk.send(Offer("a", 3))
                except TransferError:
                    break
        assert talk.link.wait_closed(PATIENCE)


@pytest.mark.parametrize(
    ("content", "digest", "reason"),
    [
        (b"abc", Digest(3, bytes(32)), "the content is not what was sent"),
        (b"ab", Digest(2, hashlib.sha256(b"ab").digest()), "2 bytes arrived, 2 were sent, 3 were offered"),
        (b"abc", Digest(4, hashlib.sha256(b"abc").digest()), "3 bytes arrived, 4 were sent, 3 were offered"),
        (b"abcd", None, "more than 3 bytes came"),
        (b"abc", Refuse("what?"), "REFUSE where the digest was due"),
    ],
)
def test_content_that_is_not_what_was_offered_is_thrown_away(
    here: Bench, content: bytes, digest: Any, reason: str
) -> None:
    with here.talk() as talk:
        talk.send(Offer("a", 3))
        talk.expect(Accept, PATIENCE, "answer")
        with talk.link.open_writer(1) as writer:
            writer.write(content)
        if digest is not None:
            talk.send(digest)
        result = talk.expect(Result, PATIENCE, "result")
        assert not result.ok and reason in str(result.reason)
    assert not here.report().ok
    assert here.files() == []


def test_a_visitor_that_says_nothing_is_shown_out(here: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rnsfast.files.reception.OFFER_WITHIN", 0.01)
    with here.talk() as talk:
        assert talk.link.wait_closed(PATIENCE)


def test_a_sender_that_does_not_close_is_closed(here: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rnsfast.files.reception.CLOSE_WITHIN", 0.01)
    with here.talk() as talk:
        talk.send(Offer("../x", 3))
        talk.expect(Refuse, PATIENCE, "answer")
        assert talk.link.wait_closed(PATIENCE)


# ------------------------------------------------------------------ what the receiver's side does wrong


def odd(pair: Pair, answer: Any, data: bytes = b"abc") -> Outcome:
    receiver = OddReceiver(pair, answer)
    return Sender(pair.a, receiver.hash, whole(data)).run(PATIENCE)


def accepting(then: Any) -> Any:
    def answer(talk: Any, message: Any) -> None:
        if isinstance(message, Offer):
            talk.link.open_reader(message.stream)
            talk.send(Accept())
        else:
            then(talk, message)

    return answer


def test_an_answer_that_is_none_is_a_fault(here: Bench) -> None:
    with pytest.raises(ProtocolFault, match="neither yes nor no"):
        odd(here.pair, lambda talk, message: talk.send(Digest()))


def test_a_receiver_that_does_not_answer_is_given_up(here: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "ANSWER_WITHIN", 0.01)
    with pytest.raises(TransferError, match="did not answer the offer"):
        odd(here.pair, lambda talk, message: None)


def test_a_receiver_that_closes_is_an_error(here: Bench) -> None:
    with pytest.raises(TransferError, match="the link to the receiver ended after 0 bytes"):
        odd(here.pair, lambda talk, message: talk.link.close())


def test_success_is_believed_only_with_our_digest(here: Bench) -> None:
    with pytest.raises(TransferError, match="the digests differ"):
        odd(here.pair, accepting(lambda talk, message: talk.send(Result(True, 3, bytes(32), None, "a"))))


def test_an_outcome_that_is_not_told_is_not_known(here: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OutcomeUnknown, match="the link ended before the receiver said"):
        odd(here.pair, accepting(lambda talk, message: talk.link.close()))
    monkeypatch.setattr(sender, "RESULT_WITHIN", 0.01)
    with pytest.raises(OutcomeUnknown, match="no word came"):
        odd(here.pair, accepting(lambda talk, message: None))


def test_a_failure_in_the_middle_stops_the_sender_at_once(here: Bench) -> None:
    def answer(talk: Any, message: Any) -> None:
        talk.send(Accept())
        talk.send(Result(False, 0, None, "the disk is full", None))

    endless = Memory(*[random_bytes(100_000)] * 10_000, size=None)
    receiver = OddReceiver(here.pair, answer)
    with pytest.raises(NotStored, match=r"^the receiver could not keep the file: the disk is full$"):
        Sender(here.pair.a, receiver.hash, endless).run(PATIENCE)
    assert endless.interrupted


def test_a_failure_wakes_a_sender_that_waits_for_its_input(here: Bench) -> None:
    reader, writer = os.pipe()
    source = open_source(f"/dev/fd/{reader}")

    def answer(talk: Any, message: Any) -> None:
        talk.send(Accept())
        os.write(writer, b"x")
        talk.send(Result(False, 0, None, "the disk is full", None))

    receiver = OddReceiver(here.pair, answer)
    with pytest.raises(NotStored, match="the disk is full"):
        Sender(here.pair.a, receiver.hash, source).run(PATIENCE)
    source.close()
    os.close(reader)
    os.close(writer)


# ------------------------------------------------------------------ ends


def test_closing_the_receiver_waits_for_transfers_that_run(here: Bench) -> None:
    begun, go_on = threading.Event(), threading.Event()
    _, worker = run(here, Memory(b"a", begun.set, lambda: go_on.wait(PATIENCE), b"b", size=2))
    assert begun.wait(PATIENCE)
    closer = Worker(here.receiver.close)
    go_on.set()
    assert worker.result().size == 2
    closer.join()
    assert here.files() == ["a.bin"]


def test_no_thread_is_left(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with bench(tmp_path / "in") as here:
        for _ in range(3):
            here.send(whole(b"x"))
        here.receiver.close()
        assert not [t for t in threading.enumerate() if t.name == "rnsfast-receive"]
    assert set(threading.enumerate()) <= before


def test_a_lost_packet_does_not_hurt(here: Bench) -> None:
    once = iter([True])
    here.pair.to_b.drop = lambda raw: is_message(raw) and next(once, False)
    assert here.send(whole(random_bytes(100_000))).size == 100_000
