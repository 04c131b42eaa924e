"""The five messages of the file protocol. Each payload is one msgpack map.  docs/file-protocol.md, Messages.

    0x5201 OFFER   sender     v, name, size (or nil), stream
    0x5202 ACCEPT  receiver
    0x5203 REFUSE  receiver   reason
    0x5204 DIGEST  sender     size, sha256
    0x5205 RESULT  receiver   ok, size, sha256 (or nil), reason (or nil), saved_as (or nil)

Reading never raises: a message that breaks the rules has `fault`, the sentence that says how.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

import msgpack

APP: Final = "rnsfast"
ASPECT: Final = "files"
VERSION: Final = 1
MAX_STREAM: Final = 0x3FFF
MAX_SIZE: Final = 1 << 63  # bytes; more is no size
NONE: Final = type(None)

Keys = Mapping[str, tuple[type, ...]]


class FileMessage:
    """What the five have in common: `KEYS` says which keys there are and what types their values may have."""

    MSGTYPE: ClassVar[int] = 0x5200
    KEYS: ClassVar[Keys] = {}
    fault: str | None = None

    def pack(self) -> bytes:
        """The payload."""
        packed: bytes = msgpack.packb({key: getattr(self, key) for key in self.KEYS})
        return packed

    def unpack(self, raw: bytes) -> None:
        """Fill in what `raw` says; what is wrong with it goes to `fault`."""
        try:
            fields = msgpack.unpackb(raw)
        except (ValueError, TypeError, OverflowError, msgpack.UnpackException):
            fields = None
        kind = type(self).__name__.upper()
        if not isinstance(fields, dict):
            self.fault = f"the other side sent {kind} that cannot be read"
            return
        for key, types in self.KEYS.items():
            value = fields.get(key)
            if key not in fields or type(value) not in types or not self._fits(key, value):
                self.fault = f"the other side sent {kind} without a proper {key}"
                return
            setattr(self, key, value)

    @staticmethod
    def _fits(key: str, value: Any) -> bool:
        """Whether a value of the right type can be meant."""
        if value is None:
            return True
        if key == "sha256":
            return len(value) == 32
        if key == "stream":
            return value in range(MAX_STREAM + 1)
        if key == "size":
            return value in range(MAX_SIZE)
        return True

    def __repr__(self) -> str:
        fields = ", ".join(f"{key}={getattr(self, key)!r}" for key in self.KEYS)
        return f"{type(self).__name__}({fields})" if self.fault is None else f"<{type(self).__name__}: {self.fault}>"


class Offer(FileMessage):
    """Here is a file."""

    MSGTYPE = 0x5201
    KEYS: ClassVar[Keys] = {"v": (int,), "name": (str,), "size": (int, NONE), "stream": (int,)}

    def __init__(self, name: str = "", size: int | None = 0, stream: int = 1, v: int = VERSION) -> None:
        self.name, self.size, self.stream, self.v = name, size, stream, v


class Accept(FileMessage):
    """Send it."""

    MSGTYPE = 0x5202


class Refuse(FileMessage):
    """Do not send it."""

    MSGTYPE = 0x5203
    KEYS: ClassVar[Keys] = {"reason": (str,)}

    def __init__(self, reason: str = "") -> None:
        self.reason = reason


class Digest(FileMessage):
    """That was all of it."""

    MSGTYPE = 0x5204
    KEYS: ClassVar[Keys] = {"size": (int,), "sha256": (bytes,)}

    def __init__(self, size: int = 0, sha256: bytes = bytes(32)) -> None:
        self.size, self.sha256 = size, sha256


class Result(FileMessage):
    """What became of it."""

    MSGTYPE = 0x5205
    KEYS: ClassVar[Keys] = {
        "ok": (bool,),
        "size": (int,),
        "sha256": (bytes, NONE),
        "reason": (str, NONE),
        "saved_as": (str, NONE),
    }

    def __init__(
        self,
        ok: bool = False,
        size: int = 0,
        sha256: bytes | None = None,
        reason: str | None = None,
        saved_as: str | None = None,
    ) -> None:
        self.ok, self.size, self.sha256, self.reason, self.saved_as = ok, size, sha256, reason, saved_as


MESSAGES: Final = (Offer, Accept, Refuse, Digest, Result)
