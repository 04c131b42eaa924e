"""The exceptions an application can meet.  All derive from RnsfastError and from the built-in class it would guess.

Bytes from the network never raise; what is wrong with them is a named counter.  What stands here is raised for a
caller's mistake, for a configuration that cannot work, and for a wait that cannot succeed any more.
"""

from __future__ import annotations


class RnsfastError(Exception):
    """Root of everything this library raises for its users."""


class NodeClosed(RnsfastError, RuntimeError):
    """The node was shut down, before the call or while it waited."""


class PathNotFound(RnsfastError, TimeoutError):
    """No path to the destination became known within the time allowed."""


class LinkTimeout(RnsfastError, TimeoutError):
    """There was a path, but no valid link proof came within the time allowed."""


class LinkClosed(RnsfastError, ConnectionError):
    """The link is closed and will not become usable again. `reason` says by whom or why."""

    def __init__(self, link_id: bytes, reason: str) -> None:
        super().__init__(f"link {link_id.hex()} is closed: {reason}")
        self.link_id, self.reason = link_id, reason


class ChannelFull(RnsfastError, TimeoutError):
    """The channel's window stayed full for the whole time allowed; `unsent` messages were not sent."""

    def __init__(self, message: str, unsent: int = 1) -> None:
        super().__init__(message)
        self.unsent = unsent


class MessageTooLarge(RnsfastError, ValueError):
    """Raised before anything is sent. `size` and `limit` are bytes; `index` says which of several it was."""

    def __init__(self, size: int, limit: int, index: int | None = None) -> None:
        which = "message" if index is None else f"message {index}"
        super().__init__(f"{which} has {size} bytes, this link carries {limit} in one; use a stream for more")
        self.size, self.limit, self.index = size, limit, index


class StreamBroken(RnsfastError, ConnectionError):
    """The stream ended without an end-of-file mark: what was read so far is truncated."""


class IdentityError(RnsfastError, ValueError):
    """Key material that cannot be an identity, or an identity that lacks the half an operation needs."""


class ConfigError(RnsfastError, ValueError):
    """A configuration that cannot work. The message names file, line, section and option; the attributes do too."""

    def __init__(
        self,
        message: str,
        *,
        file: str | None = None,
        line: int | None = None,
        section: str | None = None,
        key: str | None = None,
    ) -> None:
        super().__init__(message)
        self.file, self.line, self.section, self.key = file, line, section, key


class InterfaceError(RnsfastError, OSError):
    """An interface that could not be opened. The message names the interface, the address and the cause.

    `retryable` says whether the obstacle may go away by itself: a port that is in use, a device that is not there yet.
    """

    def __init__(self, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.retryable = retryable


class StorageError(RnsfastError, OSError):
    """A file of the node that cannot be read or written. The message names the file and the cause."""
