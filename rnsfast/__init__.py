"""rnsfast: a fast, batching implementation of the Reticulum network stack, wire-compatible with rns.

    from rnsfast import Identity, Node

    with Node() as node:
        link = node.connect(destination_hash, "example", "files")
        with link.open_writer(1) as stream:
            stream.write(b"hello")

`rnsfast.aio` has the same for asyncio.
"""

from rnsfast.crypto.identity import Identity
from rnsfast.engine.events import AnnounceHeard
from rnsfast.engine.linkstate import Reason, State
from rnsfast.errors import (
    ChannelFull,
    ConfigError,
    IdentityError,
    InterfaceError,
    LinkClosed,
    LinkTimeout,
    MessageTooLarge,
    NodeClosed,
    PathNotFound,
    RnsfastError,
    StorageError,
    StreamBroken,
)
from rnsfast.node.channel import Channel
from rnsfast.node.destinations import Inbox, Outbox
from rnsfast.node.link import Link, Receipt
from rnsfast.node.message import Message, MessageTypeError
from rnsfast.node.node import Node
from rnsfast.node.streams import StreamReader, StreamWriter
from rnsfast.wire.packet import GROUP, PLAIN, SINGLE

__version__ = "0.1.0"

__all__ = [
    "GROUP", "PLAIN", "SINGLE",
    "AnnounceHeard", "Channel", "ChannelFull", "ConfigError", "Identity", "IdentityError", "Inbox", "InterfaceError",
    "Link", "LinkClosed", "LinkTimeout", "Message", "MessageTooLarge", "MessageTypeError", "Node", "NodeClosed",
    "Outbox", "PathNotFound", "Reason", "Receipt", "RnsfastError", "State", "StorageError", "StreamBroken",
    "StreamReader", "StreamWriter", "__version__",
]  # fmt: skip
