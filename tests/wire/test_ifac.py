from __future__ import annotations

from hashlib import sha256, shake_256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rnsfast.crypto.ed25519 import SigningKey
from rnsfast.wire.drop import Drop
from rnsfast.wire.ifac import IFAC_SALT, IfacKey, mask, unmask
from rnsfast.wire.packet import IFAC_FLAG, Packet, make_raw, parse_packet
from tests.vectors_support import Case, by_name, maybe, unhex, vectors

IFAC = vectors("wire", "ifac")
NETWORKS = {case["name"]: case for case in IFAC["networks"]}


def key_of(name: str) -> IfacKey:
    network = NETWORKS[name]
    return IfacKey(network["network_name"], network["passphrase"], network["size"])


@pytest.mark.parametrize("case", IFAC["networks"], ids=by_name)
def test_keys_are_those_of_the_reference(case: Case) -> None:
    key = key_of(case["name"])
    assert IFAC_SALT.hex() == IFAC["salt"]
    assert key.key.hex() == case["ifac_key"]
    assert key.key[32:].hex() == case["signing_seed"]
    assert SigningKey(key.key[32:]).public.hex() == case["signing_public"]
    assert key.signature.hex() == case["key_check_signature"]
    assert key.size == case["size"]


@pytest.mark.parametrize("case", IFAC["mask"])
def test_masked_packets_are_those_of_the_reference(case: Case) -> None:
    key = key_of(case["network"])
    assert mask(unhex(case["raw"]), key).hex() == case["masked"]
    assert unmask(unhex(case["masked"]), key) == unhex(case["raw"])


def test_a_packet_longer_than_the_standard_key_derivation_goes() -> None:
    case = IFAC["mask_large"]
    label = case["raw_rest_shake256_of"].encode()
    raw = unhex(case["raw_prefix"]) + shake_256(label).digest(case["raw_rest_length"])
    key = key_of(case["network"])
    masked = mask(raw, key)
    assert len(masked) == case["masked_length"] and sha256(masked).hexdigest() == case["masked_sha256"]
    assert masked.hex().startswith(case["masked_head"]) and masked.hex().endswith(case["masked_tail"])
    assert unmask(masked, key) == raw


@pytest.mark.parametrize("case", IFAC["receive"], ids=by_name)
def test_frames_are_received_as_by_the_reference(case: Case) -> None:
    frame = unhex(case["frame"])
    if case["network"] is None:  # an open interface: any code is one too many
        coded = bool(frame[0] & IFAC_FLAG)
        assert coded is (case["outcome"] == "ifac_violation")
        return
    inner = unmask(frame, key_of(case["network"]))
    if case["outcome"] == "accepted":
        assert inner == maybe(case["inner"])
        assert isinstance(parse_packet(unhex(case["inner"])), Packet)
    elif len(frame) <= 2:
        assert isinstance(inner, Drop)
    elif case["outcome"] == "ifac_violation":
        assert isinstance(inner, Drop) and inner.value.startswith("ifac.")
    else:  # the code holds, the packet does not
        assert not isinstance(inner, Drop) and isinstance(parse_packet(inner), Drop)


@given(st.binary(min_size=2, max_size=700), st.integers(1, 64))
def test_what_is_masked_unmasks(raw: bytes, size: int) -> None:
    raw = bytes((raw[0] & 0x7F,)) + raw[1:]
    key = IfacKey("net", "pass", size)
    frame = mask(raw, key)
    assert len(frame) == len(raw) + size and frame[0] & IFAC_FLAG
    if len(raw) > 2:
        assert unmask(frame, key) == raw


@given(st.binary(max_size=200), st.integers(8, 64))
def test_noise_is_dropped(frame: bytes, size: int) -> None:
    assert isinstance(unmask(frame, IfacKey("net", "pass", size)), Drop)


def test_every_flipped_bit_is_caught() -> None:
    key = key_of("both")
    raw = make_raw(0x0C, b"d" * 16, 0, b"data")
    frame = mask(raw, key)
    for i in range(len(frame)):
        for bit in range(8):
            flipped = frame[:i] + bytes((frame[i] ^ 1 << bit,)) + frame[i + 1 :]
            assert isinstance(unmask(flipped, key), Drop)


@pytest.mark.parametrize(
    ("frame", "drop"),
    [
        (b"", Drop.IFAC_MISSING),
        (b"\x00" * 40, Drop.IFAC_MISSING),
        (b"\x80" * 18, Drop.IFAC_SHORT),
        (b"\x80" * 19, Drop.IFAC_INVALID),
    ],
)
def test_what_is_wrong_has_a_name(frame: bytes, drop: Drop) -> None:
    assert unmask(frame, key_of("both")) is drop


def test_name_alone_and_passphrase_alone_are_the_same_secret() -> None:
    assert IfacKey("x", None, 8).key == IfacKey(None, "x", 8).key == IfacKey("x", "", 8).key
    assert IfacKey("x", "y", 8).key != IfacKey("y", "x", 8).key


@pytest.mark.parametrize("arguments", [(None, None, 8), ("", "", 8), ("x", None, 0), ("x", None, 65)])
def test_keys_that_cannot_be(arguments: tuple[str | None, str | None, int]) -> None:
    with pytest.raises(ValueError, match="access code"):
        IfacKey(*arguments)
