"""What was received and handed up is proved before the link is closed.  Protocol 03, sections 12 and 13.3."""

from __future__ import annotations

from rnsfast.wire.channel import pack_envelope
from rnsfast.wire.packet import CTX_LINKCLOSE, DATA, PROOF, packet_hash
from tests.engine.support import NOW, make_link, sealed_channel, sent


def test_a_close_between_the_data_and_its_proofs_lets_the_proofs_go_first() -> None:
    link, _, port = make_link()
    link.open_channel(NOW)
    packets = [sealed_channel(pack_envelope(0x0101, n, b"data"), n.to_bytes(16, "big")) for n in range(3)]
    link.engine.intake(port, link.engine.relay(port, packets, NOW), NOW)
    settlements = link.engine.take_settlements()  # from here on the application has its data and the lock is free
    link.close(NOW)
    for settlement in settlements:
        settlement.compute()
    link.engine.settle(settlements, NOW)
    *proofs, close = sent(port)
    assert [(raw[0] & 3, raw[19:51]) for raw in proofs] == [(PROOF, packet_hash(packet)) for packet in packets]
    assert (close[0] & 3, close[18]) == (DATA, CTX_LINKCLOSE)


def test_a_close_after_the_proofs_repeats_none_of_them() -> None:
    link, _, port = make_link()
    link.open_channel(NOW)
    link.engine.receive(port, [sealed_channel(pack_envelope(0x0101, 0, b"data"), bytes(16))], NOW)
    link.close(NOW)
    assert [raw[0] & 3 for raw in sent(port)] == [PROOF, DATA]


def test_a_close_by_the_application_inside_the_batch_proves_what_came_before() -> None:
    link, _, port = make_link()
    link.open_channel(NOW)
    link.engine.intake(port, [sealed_channel(pack_envelope(0x0101, 0, b"data"), bytes(16))], NOW)
    link.close(NOW)
    link.engine.settle_now(NOW)
    assert [raw[0] & 3 for raw in sent(port)] == [PROOF, DATA]
