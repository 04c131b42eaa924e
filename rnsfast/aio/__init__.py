"""The same objects for asyncio.

    async with aio.Node(configdir) as node:
        link = await node.connect(destination_hash, "example", "files")
        async with link.open_writer(1) as stream:
            await stream.write(b"hello")

Names and meanings are those of the plain API; what waits there is awaited here.  A waiter is one future, resolved by
the change it waits for; no thread waits for it.  Everything may be cancelled at any moment: a cancelled `send` has
queued nothing, a cancelled `connect` leaves no link, a cancelled read loses no data.  Handlers may be plain or async
functions and run in the loop that registered them, in order for each kind of event of each link.  Each wrapper has the
plain object in `sync`; both may be used side by side, from several loops and threads.
"""

from rnsfast.aio.channel import Channel
from rnsfast.aio.destinations import Inbox, Outbox
from rnsfast.aio.link import Link, Receipt
from rnsfast.aio.node import Announces, Node
from rnsfast.aio.streams import StreamReader, StreamWriter

__all__ = [
    "Announces", "Channel", "Inbox", "Link", "Node", "Outbox", "Receipt", "StreamReader", "StreamWriter",
]  # fmt: skip
