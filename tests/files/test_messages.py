"""The five messages as bytes."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rnsfast.files.messages import MESSAGES, Accept, Digest, FileMessage, Offer, Refuse, Result
from rnsfast.files.names import NAME_BYTES, REASON_BYTES, SAVED_BYTES

LARGEST = [
    Offer("é" * (NAME_BYTES // 2), 2**62, 16383),
    Accept(),
    Refuse("é" * (REASON_BYTES // 2)),
    Digest(2**62, bytes(32)),
    Result(False, 2**62, bytes(32), "é" * (REASON_BYTES // 2), None),
    Result(True, 2**62, bytes(32), None, "é" * (SAVED_BYTES // 2)),
]


def read(kind: type[FileMessage], raw: bytes) -> FileMessage:
    message = kind()
    message.unpack(raw)
    return message


@pytest.mark.parametrize("message", LARGEST, ids=repr)
def test_a_message_reads_as_it_was_written_and_fits_the_smallest_link(message: FileMessage) -> None:
    raw = message.pack()
    again = read(type(message), raw)
    assert len(raw) <= 425
    assert again.fault is None
    assert vars(again) == vars(message)


def test_types_are_those_of_the_document() -> None:
    assert [kind.MSGTYPE for kind in MESSAGES] == [0x5201, 0x5202, 0x5203, 0x5204, 0x5205]


def test_keys_nobody_knows_yet_are_ignored() -> None:
    raw = msgpack.packb({"v": 1, "name": "a", "size": None, "stream": 1, "later": [1, 2]})
    assert read(Offer, raw).fault is None


@pytest.mark.parametrize(
    ("kind", "fields", "key"),
    [
        (Offer, {"v": 1, "name": "a", "size": 1}, "stream"),
        (Offer, {"v": 1, "name": b"a", "size": 1, "stream": 1}, "name"),
        (Offer, {"v": 1, "name": "a", "size": -1, "stream": 1}, "size"),
        (Offer, {"v": 1, "name": "a", "size": 2**63, "stream": 1}, "size"),
        (Offer, {"v": 1, "name": "a", "size": 1.0, "stream": 1}, "size"),
        (Offer, {"v": 1, "name": "a", "size": 1, "stream": 16384}, "stream"),
        (Offer, {"v": True, "name": "a", "size": 1, "stream": 1}, "v"),
        (Refuse, {}, "reason"),
        (Digest, {"size": 1, "sha256": bytes(31)}, "sha256"),
        (Digest, {"size": None, "sha256": bytes(32)}, "size"),
        (Result, {"ok": 1, "size": 1, "sha256": None, "reason": None, "saved_as": None}, "ok"),
    ],
)
def test_a_wrong_value_is_a_fault_that_names_the_key(kind: type[FileMessage], fields: Any, key: str) -> None:
    assert str(read(kind, msgpack.packb(fields)).fault).endswith(f"without a proper {key}")


@pytest.mark.parametrize("raw", [b"", b"\xc1", b"\x81", b"\x90", b"\x80\x80", msgpack.packb([1]), b"\x81\xa1\xff\x01"])
def test_what_is_no_map_is_a_fault(raw: bytes) -> None:
    assert read(Offer, raw).fault is not None


@given(st.binary(max_size=425))
def test_reading_never_raises(raw: bytes) -> None:
    for kind in MESSAGES:
        message = read(kind, raw)
        if message.fault is None:
            assert read(kind, message.pack()).fault is None
