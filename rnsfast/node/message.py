"""Typed messages on a channel.  Protocol 05, section 3.7."""

from __future__ import annotations

from typing import ClassVar, Final, Protocol

from rnsfast.errors import RnsfastError
from rnsfast.wire.channel import APPLICATION_TYPES


class Message(Protocol):
    """What applications send over a channel: a class with a type number and two methods.

    `MSGTYPE` is 0x0000 to 0xEFFF; both ends must agree on it. `pack` returns the payload, `unpack` reads one into an
    object that was made without arguments.

        class Note:
            MSGTYPE = 0x0101

            def __init__(self, text: str = "") -> None:
                self.text = text

            def pack(self) -> bytes:
                return self.text.encode()

            def unpack(self, raw: bytes) -> None:
                self.text = raw.decode()
    """

    MSGTYPE: ClassVar[int]

    def pack(self) -> bytes: ...
    def unpack(self, raw: bytes, /) -> None: ...


class MessageTypeError(RnsfastError, TypeError):
    """A class that cannot be a message type, or a message without one. `code` is the reference's number for it."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code: Final = code


def check_registrable(cls: type) -> int:
    """The type number of a message class that may be registered, else MessageTypeError."""
    number = getattr(cls, "MSGTYPE", None)
    name = getattr(cls, "__name__", repr(cls))
    if not (callable(getattr(cls, "pack", None)) and callable(getattr(cls, "unpack", None))):
        raise MessageTypeError(f"{name} is no message class: it needs MSGTYPE, pack() and unpack(raw)", 1)
    if not isinstance(number, int) or number not in APPLICATION_TYPES:
        shown = number if not isinstance(number, int) else f"{number:#06x}"
        raise MessageTypeError(f"{name}.MSGTYPE is {shown}, it must be within 0x0000..0xefff", 1)
    try:
        cls()
    except Exception as error:
        raise MessageTypeError(f"{name} cannot be made without arguments ({error}); messages must be", 1) from error
    return number


def type_of(message: Message) -> int:
    """The type number a message is sent with. Sending needs no registration, also of reserved types."""
    number = getattr(message, "MSGTYPE", None)
    if not isinstance(number, int):
        raise MessageTypeError(f"{type(message).__name__} has no MSGTYPE: nothing can be sent without one", 0)
    if not 0 <= number <= 0xFFFF:
        raise MessageTypeError(f"{type(message).__name__}.MSGTYPE is {number:#x}, a type has 16 bits", 0)
    return number
