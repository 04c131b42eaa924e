"""Why a file did not arrive. Each message is one sentence for a person."""

from __future__ import annotations

from rnsfast.errors import RnsfastError


class TransferError(RnsfastError, ConnectionError):
    """A transfer that began and did not succeed: the receiver failed, or the link ended."""


class Refused(TransferError):
    """The receiver did not want the file. `reason` is its own sentence."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the receiver refused: {reason}")
        self.reason = reason


class ProtocolFault(TransferError):
    """The other side said something that the protocol does not know."""


class SourceFault(TransferError):
    """What is being sent cannot be read, or changed its size meanwhile."""


class NotStored(TransferError):
    """The receiving side cannot keep the file: full disk, no permission…"""


class OutcomeUnknown(TransferError):
    """Everything was sent, but the receiver never said whether it kept the file."""


class Interrupted(TransferError):
    """`cancel` was called."""


class NotAReceiver(TransferError):
    """The address belongs to something that receives no files."""
