"""What a node says about itself as JSON."""

from __future__ import annotations

import json
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any

import pytest

from rnsfast.node.control import build_document, plain


class Word(Enum):
    ONE = "the one"


class Number(IntEnum):
    GATEWAY = 6


class Odd(Enum):
    TWO = (1, 2)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (b"\x01\xff", "01ff"),
        (bytearray(b"\x02"), "02"),
        (memoryview(b"\x03"), "03"),
        (Word.ONE, "the one"),
        (Number.GATEWAY, "gateway"),
        (Odd.TWO, "two"),
        (float("nan"), None),
        (float("inf"), None),
        (1.5, 1.5),
        (True, True),
        (None, None),
        ({b"\xaa": {1: (1, b"\x00")}}, {"aa": {"1": [1, "00"]}}),
        (frozenset({1}), [1]),
        (Path("/a"), "/a"),
        ("\ud800\x1b", "\ud800\x1b"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_become_what_json_has(value: Any, expected: Any) -> None:
    assert plain(value) == expected
    assert json.loads(build_document({"it": value}))["it"] == expected


def test_a_value_that_contains_itself_ends_somewhere() -> None:
    loop: dict[str, Any] = {}
    loop["it"] = loop
    assert build_document(loop).endswith(b"\n")
