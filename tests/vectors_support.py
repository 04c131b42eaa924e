"""The test vectors: what the reference stack made and accepted, recorded.  Binary data is hex, null is none."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

Case = dict[str, Any]

_FOLDER = Path(__file__).parent / "vectors"


@cache
def _topic(topic: str) -> Any:
    return json.loads((_FOLDER / f"{topic}.json").read_text(encoding="utf-8"))


def vectors(topic: str, *path: str | int) -> Any:
    """What stands in the vectors of `topic` ("wire", "link", ...) at `path`. Shared between tests: do not change it."""
    found = _topic(topic)
    for step in path:
        found = found[step]
    return found


def unhex(text: str | None) -> bytes:
    """The bytes of a hex string; a vector that has none has the empty bytes here."""
    return bytes.fromhex(text or "")


def maybe(text: str | None) -> bytes | None:
    """The bytes of a hex string, None for none."""
    return None if text is None else bytes.fromhex(text)


def by_name(case: Any) -> str | None:
    """A test id for a case: its name if it has one."""
    return str(case["name"]) if isinstance(case, dict) and "name" in case else None
