"""Sending and receiving files over links: the protocol of `rnsfast send` and `rnsfast receive` (docs/file-protocol.md).

with Node(configdir) as node:
    outcome = Sender(node, destination_hash, open_source(path)).run(timeout=30)

with Node(configdir) as node:
    receiver = Receiver(node, identity, directory, on_report=print)
    receiver.announce()
"""

from rnsfast.files.errors import (
    Interrupted,
    NotAReceiver,
    NotStored,
    OutcomeUnknown,
    ProtocolFault,
    Refused,
    SourceFault,
    TransferError,
)
from rnsfast.files.messages import APP, ASPECT
from rnsfast.files.receiver import Receiver
from rnsfast.files.reception import Arriving, Report
from rnsfast.files.sender import Outcome, Progress, Sender
from rnsfast.files.source import Source, open_source

__all__ = [
    "APP", "ASPECT",
    "Arriving", "Interrupted", "NotAReceiver", "NotStored", "Outcome", "OutcomeUnknown", "Progress", "ProtocolFault",
    "Receiver", "Refused", "Report", "Sender", "Source", "SourceFault", "TransferError", "open_source",
]  # fmt: skip
