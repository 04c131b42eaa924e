from __future__ import annotations

import bz2
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rnsfast.crypto.ed25519 import SigningKey
from rnsfast.crypto.token import TokenKey, seal_with_iv
from rnsfast.wire import packet as p
from rnsfast.wire.channel import (
    ACCEPTANCE_SPAN,
    channel_mdu,
    is_acceptable,
    pack_envelope,
    parse_envelope,
)
from rnsfast.wire.drop import Drop
from rnsfast.wire.packet import link_mdu, make_raw, packet_hash
from rnsfast.wire.proof import link_proof_packet
from rnsfast.wire.stream import (
    MAX_CHUNK,
    STREAM_HEADER_SIZE,
    STREAM_TYPE,
    StreamData,
    compress_chunk,
    decompress,
    pack_stream,
    parse_stream,
)
from tests.vectors_support import Case, by_name, unhex, vectors

ENVELOPES = vectors("channel", "envelopes")
MESSAGES = vectors("channel", "stream_messages")
WRITER = vectors("channel", "writer")


@pytest.mark.parametrize("case", ENVELOPES["pack"])
def test_envelopes_are_those_of_the_reference(case: Case) -> None:
    payload = unhex(case["payload"])
    assert pack_envelope(case["msgtype"], case["sequence"], payload).hex() == case["raw"]
    assert parse_envelope(unhex(case["raw"])) == (case["msgtype"], case["sequence"], payload)


@pytest.mark.parametrize("case", ENVELOPES["length_field_ignored"], ids=by_name)
def test_the_length_field_is_not_believed(case: Case) -> None:
    found = parse_envelope(unhex(case["raw"]))
    assert found == (0x0101, case["sequence"], unhex(case["payload"]))


@pytest.mark.parametrize("case", ENVELOPES["rejected"], ids=by_name)
def test_short_envelopes_are_dropped(case: Case) -> None:
    found = parse_envelope(unhex(case["raw"]))
    if case["error"] == "malformed":
        assert found is Drop.ENVELOPE_SIZE
    else:  # an unregistered type is the channel's to refuse
        assert not isinstance(found, Drop) and found[0] != 0x0101


@given(st.binary(max_size=60))
def test_envelopes_never_raise_and_build_back(plain: bytes) -> None:
    found = parse_envelope(plain)
    if isinstance(found, Drop):
        assert len(plain) < 6
    else:
        rebuilt = pack_envelope(*found)
        assert rebuilt[:4] + rebuilt[6:] == plain[:4] + plain[6:]


@pytest.mark.parametrize("case", vectors("channel", "receive", "acceptance"))
def test_acceptance(case: list[int]) -> None:
    expected, sequence, accepted = case
    assert is_acceptable(sequence, expected) is accepted


def test_forty_nine_sequences_are_acceptable_wherever_one_stands() -> None:
    for expected in (0, 1, 30000, 65500, 65535):
        assert sum(is_acceptable(s, expected) for s in range(65536)) == ACCEPTANCE_SPAN + 1


@pytest.mark.parametrize("case", vectors("channel", "mdu"), ids=lambda c: str(c["link_mtu"]))
def test_sizes(case: Case) -> None:
    mdu = link_mdu(case["link_mtu"])
    assert mdu == case["link_mdu"]
    assert channel_mdu(mdu) == case["channel_mdu"]
    assert min(channel_mdu(mdu) - STREAM_HEADER_SIZE, MAX_CHUNK) == case["stream_payload"]
    plain = 6 + case["channel_mdu"]
    assert 19 + 48 + 16 * (plain // 16 + 1) == case["largest_channel_packet"]


@pytest.mark.parametrize("case", vectors("channel", "packets"), ids=lambda c: c["link_id"][:6])
def test_channel_packets_and_their_proofs_are_rebuilt(case: Case) -> None:
    key, link_id = unhex(case["link_key"]), unhex(case["link_id"])
    for sent in (case["first_transmission"], case["retransmission"]):
        raw = make_raw(0x0C, link_id, p.CTX_CHANNEL, seal_with_iv(key, unhex(sent["iv"]), unhex(case["envelope"])))
        assert raw.hex() == sent["raw"]
        assert TokenKey(key).open(raw[19:]) == unhex(case["envelope"])
        h = packet_hash(raw)
        assert h.hex() == sent["packet_hash"]
        for side in ("initiator", "responder"):
            signing = SigningKey(unhex(case[f"{side}_sig_prv"]))
            assert signing.public.hex() == case[f"{side}_sig_pub"]
            assert link_proof_packet(link_id, h, signing.sign(h)).hex() == sent["proofs"][f"by_{side}"]


@pytest.mark.parametrize("case", MESSAGES["pack"])
def test_stream_messages_are_those_of_the_reference(case: Case) -> None:
    made = pack_stream(case["stream_id"], unhex(case["data"]), case["eof"], case["compressed"])
    assert made.hex() == case["payload"]


@pytest.mark.parametrize("case", MESSAGES["unpack"], ids=by_name)
def test_stream_messages_read_as_for_the_reference(case: Case) -> None:
    found = parse_stream(unhex(case["payload"]))
    assert isinstance(found, StreamData)
    assert (found.stream_id, found.eof, len(found.data)) == (case["stream_id"], case["eof"], case["data_len"])
    assert sha256(found.data).hexdigest() == case["data_sha256"]


@pytest.mark.parametrize("case", MESSAGES["rejected"], ids=by_name)
def test_stream_messages_that_must_not_be_accepted(case: Case) -> None:
    short = len(unhex(case["payload"])) < 2
    assert parse_stream(unhex(case["payload"])) is (Drop.STREAM_SIZE if short else Drop.STREAM_COMPRESSION)


@pytest.mark.parametrize("stream_id", [*MESSAGES["stream_ids_refused_by_sender"], -1])
def test_stream_ids_out_of_range_are_not_sent(stream_id: int) -> None:
    with pytest.raises(ValueError, match=f"stream id {stream_id} is not within"):
        pack_stream(stream_id, b"", False, False)


def noise(tag: str, size: int) -> bytes:
    blocks = (sha256(tag.encode() + i.to_bytes(4, "big")).digest() for i in range(size // 32 + 1))
    return b"".join(blocks)[:size]


def written(case: Case) -> bytes:
    """The input of a writer case."""
    kind, size, tag = case["input"], case["input_len"], case["input_tag"]
    if kind == "zeros":
        return bytes(size)
    if kind == "text":
        return (b"0123456789 the quick brown fox jumps over the lazy dog\n" * (size // 50 + 1))[:size]
    if kind == "random":
        return noise(tag, size)
    zeros = size // (2 if kind == "zeros_then_random" else 3)
    return bytes(zeros) + noise(tag, size - zeros)


@pytest.mark.parametrize("case", WRITER["cases"], ids=lambda c: f"{c['link_mdu']}-{c['input']}-{c['input_len']}")
def test_chunks_are_cut_as_by_the_reference(case: Case) -> None:
    data = written(case)
    consumed, body, compressed = compress_chunk(data, channel_mdu(case["link_mdu"]) - STREAM_HEADER_SIZE)
    assert (consumed, compressed, len(body)) == (case["returned"], case["compressed"], case["body_len"])
    assert pack_stream(5, b"", False, compressed).hex() == case["header"]
    assert sha256(body).hexdigest() == case["body_sha256"]
    found = parse_stream(pack_stream(5, body, False, compressed))
    assert found == StreamData(5, False, data[:consumed])


@pytest.mark.parametrize("case", WRITER["streams"], ids=lambda c: f"{c['link_mdu']}-{c['input']}")
def test_streams_are_cut_as_by_the_reference(case: Case) -> None:
    data, room, writes = written(case), channel_mdu(case["link_mdu"]) - STREAM_HEADER_SIZE, []
    while data:
        consumed, body, compressed = compress_chunk(data, room)
        writes.append([consumed, compressed, len(body)])
        data = data[consumed:]
    assert writes == case["writes"]


def test_empty_write_and_close_messages() -> None:
    envelopes = [unhex(case["envelope"]) for case in WRITER["misc"] if "envelope" in case]
    messages = [pack_stream(5, b"", False, False), pack_stream(5, b"", True, False), pack_stream(5, b"x", True, False)]
    assert envelopes == [pack_envelope(STREAM_TYPE, i, message) for i, message in enumerate(messages)]


def test_without_tries_nothing_is_compressed() -> None:
    assert compress_chunk(bytes(1000), 423, 0) == (423, bytes(423), False)
    assert compress_chunk(b"", 423) == (0, b"", False)


@given(st.binary(max_size=2000), st.integers(1, 1000), st.integers(0, 3))
def test_chunks_always_fit_and_make_progress(data: bytes, room: int, tries: int) -> None:
    got = b""
    rest = data
    while rest:
        consumed, body, compressed = compress_chunk(rest, room, tries)
        assert consumed > 0 and len(body) <= room
        found = parse_stream(pack_stream(1, body, False, compressed))
        assert isinstance(found, StreamData)
        got += found.data
        rest = rest[consumed:]
    assert got == data


@given(st.binary(max_size=100))
def test_stream_messages_never_raise(payload: bytes) -> None:
    found = parse_stream(payload)
    if isinstance(found, StreamData) and not payload[0] & 0x40:
        assert pack_stream(found.stream_id, found.data, found.eof, False) == payload


@given(st.binary(min_size=40, max_size=300), st.data())
def test_damaged_compression_is_never_more_than_a_drop(data: bytes, draw: st.DataObject) -> None:
    packed = bytearray(bz2.compress(data))
    packed[draw.draw(st.integers(0, len(packed) - 1))] ^= draw.draw(st.integers(1, 255))
    found = parse_stream(b"\x40\x01" + bytes(packed))
    assert found is Drop.STREAM_COMPRESSION or isinstance(found, StreamData)


@pytest.mark.parametrize("case", vectors("wire", "bz2"), ids=by_name)
def test_bz2(case: Case) -> None:
    plain = decompress(unhex(case["compressed"]), case["plain_length"])
    assert plain is not None and sha256(plain).hexdigest() == case["plain_sha256"]
    assert decompress(unhex(case["compressed"]), case["plain_length"] - 1) is None
    assert decompress(unhex(case["compressed"])[:-1], case["plain_length"]) is None


def test_a_bomb_is_stopped_at_the_limit() -> None:
    bomb = bz2.compress(bytes(50_000_000))
    assert len(bomb) < 200
    assert parse_stream(b"\x40\x01" + bomb) is Drop.STREAM_COMPRESSION
