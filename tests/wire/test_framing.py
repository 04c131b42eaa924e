from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rnsfast.wire import hdlc, kiss
from rnsfast.wire.drop import Drop
from rnsfast.wire.hdlc import HdlcDecoder
from rnsfast.wire.kiss import KissDecoder
from tests.vectors_support import Case, by_name, unhex, vectors

FRAMING = vectors("wire", "framing")

special = st.lists(st.sampled_from(b"\x7e\x7d\x5e\x5d\xc0\xdb\xdc\xdd"), min_size=20, max_size=60).map(bytes)
packets = st.lists(st.binary(min_size=20, max_size=80) | special, max_size=8)
streams = st.lists(st.sampled_from([0x7E, 0x7D, 0x5E, 0x5D, 0xC0, 0xDB, 0xDC, 0xDD, 0, 1]), max_size=400).map(bytes)


def chunks(data: bytes, seed: int) -> list[bytes]:
    """`data` cut at random places, with empty pieces among them."""
    rng = random.Random(seed)
    cuts = sorted(rng.choices(range(len(data) + 1), k=rng.randrange(12)))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def plain_hdlc(stream: bytes, longest: int) -> list[bytes]:
    """The buffered rule written down byte by byte: what the decoder must do, slowly."""
    frames: list[bytes] = []
    current: bytearray | None = None
    for byte in stream:
        if byte == 0x7E:
            if current is not None:
                frames.append(bytes(current))
            current = bytearray()
        elif current is not None:
            current.append(byte)
    out = []
    for frame in frames:
        plain, i = bytearray(), 0
        while i < len(frame):
            if frame[i] == 0x7D and i + 1 < len(frame) and frame[i + 1] in (0x5D, 0x5E):
                plain.append(frame[i + 1] ^ 0x20)
                i += 2
            else:
                plain.append(frame[i])
                i += 1
        if 20 <= len(plain) <= longest:
            out.append(bytes(plain))
    return out


def plain_kiss(stream: bytes, longest: int) -> list[bytes]:
    """The KISS rule written down byte by byte."""
    frames: list[bytes] = []
    inside, command, escape, buffer = False, -1, False, bytearray()
    for byte in stream:
        if inside and byte == 0xC0 and command == 0:
            inside = False
            if buffer:
                frames.append(bytes(buffer))
        elif byte == 0xC0:
            inside, command, buffer = True, -1, bytearray()
        elif inside and command == -1:
            command = byte & 0x0F
        elif inside and command == 0 and len(buffer) < longest:
            if byte == 0xDB:
                escape = True
                continue
            if escape:
                byte = {0xDC: 0xC0, 0xDD: 0xDB}.get(byte, byte)
                escape = False
            buffer.append(byte)
    return frames


@pytest.mark.parametrize("case", FRAMING["encode"])
def test_frames_are_those_of_the_reference(case: Case) -> None:
    payload = unhex(case["payload"])
    assert hdlc.encode(payload).hex() == case["hdlc"]
    assert kiss.encode(payload).hex() == case["kiss"]


@pytest.mark.parametrize("case", FRAMING["hdlc_decode"], ids=by_name)
def test_hdlc_decodes_by_the_buffered_rule(case: Case) -> None:
    decoder = HdlcDecoder(case["mtu"] + case["ifac_size"], buffer_limit=2 * case["mtu"])
    frames = [frame for chunk in case["chunks"] for frame in decoder.feed(unhex(chunk))]
    assert [frame.hex() for frame in frames] == case["buffered"]
    default = HdlcDecoder(case["mtu"] + case["ifac_size"])
    assert [frame.hex() for chunk in case["chunks"] for frame in default.feed(unhex(chunk))] == case["buffered"]


#: Escapes before other bytes: the two rules differ on what no sender makes.
NOT_SENT = ("escape before other byte", "two escapes then 5e", "escape before closing flag")


@pytest.mark.parametrize("case", [c for c in FRAMING["hdlc_decode"] if c["name"] not in NOT_SENT], ids=by_name)
def test_the_buffered_rule_takes_every_good_frame_the_bytewise_rule_takes(case: Case) -> None:
    good = [f for f in case["bytewise"] if 20 <= len(f) // 2 < case["mtu"]]
    assert all(frame in case["buffered"] for frame in good)


@pytest.mark.parametrize("case", FRAMING["kiss_decode"], ids=by_name)
def test_kiss_decodes_as_the_reference_does(case: Case) -> None:
    decoder = KissDecoder(case["mtu"])
    assert [frame.hex() for frame in decoder.feed(unhex(case["stream"]))] == case["frames"]
    bytewise = KissDecoder(case["mtu"])
    stream = unhex(case["stream"])
    assert [f.hex() for i in range(len(stream)) for f in bytewise.feed(stream[i : i + 1])] == case["frames"]


@pytest.mark.parametrize("case", FRAMING["serial_idle"], ids=by_name)
def test_serial_streams_with_pauses(case: Case) -> None:
    """With the buffered rule no pause is needed to come back into step, and none does harm: nothing good is lost."""
    decoder = HdlcDecoder(580)
    frames = [f.hex() for part in case["input"] if isinstance(part, str) for f in decoder.feed(unhex(part))]
    assert all(frame in frames for frame in case["frames"])


@given(packets, st.integers())
def test_hdlc_frames_survive_any_chunking(items: list[bytes], seed: int) -> None:
    stream = b"".join(hdlc.encode(packet) for packet in items)
    assert hdlc.encode_many(items) == stream
    decoder = HdlcDecoder(80)
    assert [frame for chunk in chunks(stream, seed) for frame in decoder.feed(chunk)] == items
    assert not decoder.drops


@given(packets, st.integers())
def test_kiss_frames_survive_any_chunking(items: list[bytes], seed: int) -> None:
    stream = b"".join(kiss.encode(packet) for packet in items)
    decoder = KissDecoder(80)
    assert [frame for chunk in chunks(stream, seed) for frame in decoder.feed(chunk)] == items


@given(streams | st.binary(max_size=300), st.integers())
def test_hdlc_agrees_with_the_rule_written_byte_by_byte(stream: bytes, seed: int) -> None:
    decoder = HdlcDecoder(60, buffer_limit=10_000)
    assert [f for chunk in chunks(stream, seed) for f in decoder.feed(chunk)] == plain_hdlc(stream, 60)


@given(streams | st.binary(max_size=300), st.integers())
def test_kiss_agrees_with_the_rule_written_byte_by_byte(stream: bytes, seed: int) -> None:
    decoder = KissDecoder(60)
    assert [f for chunk in chunks(stream, seed) for f in decoder.feed(chunk)] == plain_kiss(stream, 60)


@given(st.integers(0, 10_000))
def test_after_damage_the_next_but_one_frame_is_intact(seed: int) -> None:
    rng = random.Random(seed)
    items = [rng.randbytes(rng.randrange(20, 60)) for _ in range(6)]
    for encode, decoder in ((hdlc.encode, HdlcDecoder(200)), (kiss.encode, KissDecoder(200))):
        frames = [encode(packet) for packet in items]
        hurt = bytearray(frames[1])
        at = rng.randrange(len(hurt))
        if rng.random() < 0.5:
            del hurt[at]
        else:
            hurt.insert(at, rng.choice((0x7E, 0x7D, 0xC0, 0xDB, rng.randrange(256))))
        frames[1] = bytes(hurt)
        got = decoder.feed(b"".join(frames))
        assert got[0] == items[0]
        assert got[-3:] == items[-3:]


def test_memory_is_bounded_without_flags() -> None:
    decoder, kiss_decoder = HdlcDecoder(500), KissDecoder(500)
    decoder.feed(b"\x7e")
    kiss_decoder.feed(b"\xc0")
    for _ in range(1000):
        assert decoder.feed(b"x" * 100) == kiss_decoder.feed(b"x" * 100) == []
        assert sum(map(len, decoder._parts)) <= 1000
        assert sum(map(len, kiss_decoder._parts)) <= 1001
    packet = bytes(range(100))
    assert decoder.feed(hdlc.encode(packet)) == [packet]
    assert decoder.drops[Drop.FRAME_UNFINISHED] == 1


def test_drops_are_counted_by_reason() -> None:
    decoder = HdlcDecoder(100)
    decoder.feed(b"\x7e" * 1000)
    assert decoder.drops == Counter()
    decoder.feed(b"a" * 19 + b"\x7e" + b"b" * 101 + b"\x7e")
    assert decoder.drops == {Drop.FRAME_SHORT: 1, Drop.FRAME_LONG: 1}


def test_reset_forgets_the_unfinished_frame() -> None:
    packet = bytes(range(30))
    for decoder, encode in ((HdlcDecoder(100), hdlc.encode), (KissDecoder(100), kiss.encode)):
        frame = encode(packet)
        decoder.feed(frame[:10])
        decoder.reset()
        assert decoder.feed(frame[10:-1]) == []
        decoder.reset()
        assert decoder.feed(frame) == [packet]


def test_chunks_may_be_views_and_frames_are_bytes() -> None:
    frame = bytearray(hdlc.encode(bytes(20)))
    (got,) = HdlcDecoder(100).feed(memoryview(frame))
    assert isinstance(got, bytes)
    frame[:] = bytes(len(frame))
    assert got == bytes(20)


def test_many_small_chunks_cost_no_more_than_one() -> None:
    """The pieces of a frame are joined once: their number times their size is what is copied."""
    packet = b"z" * 100_000
    frame = hdlc.encode(packet)
    decoder = HdlcDecoder(200_000)
    got = [f for i in range(0, len(frame), 10) for f in decoder.feed(frame[i : i + 10])]
    assert got == [packet] and decoder._parts == []


def test_ready_answers_of_a_device_are_counted() -> None:
    decoder = KissDecoder(100)
    assert decoder.feed(kiss.encode(b"", kiss.COMMAND_READY) * 2) == []
    assert decoder.ready == 2


def test_encoding_nothing_is_nothing() -> None:
    assert hdlc.encode_many([]) == b""
