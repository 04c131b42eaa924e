"""What an error of a send says about the packets it was about.  Protocol 09, section 4.5.

One table for datagrams and TUN devices. Back ends add what their own calls mean by the same numbers. On a stream
everything but EINTR and EAGAIN is the end; see `stream`.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Mapping
from enum import Enum
from typing import Final

log = logging.getLogger(__name__)

REPEATS: Final = 3  # immediate repeats where an error may be gone at once


class Verdict(Enum):
    RETRY = 0  # the same call again, as often as it takes
    REPEAT = 1  # again at most REPEATS times, then as REJECT
    REJECT = 2  # this packet is dropped, the next ones go out
    BLOCKED = 3  # surely not taken: wait for writability
    AGAIN = 4  # the back end has changed its way: offer the same packets again
    UNKNOWN = 5  # may have been taken: never again
    BROKEN = 6  # the descriptor is unusable


EBADFD: Final = 77  # "file descriptor in bad state", Linux: a TUN device that was removed
WSA: Final = 10_000  # Windows numbers the errors of sockets from here

#: Everything that is not listed rejects one packet.
SEND: Final[Mapping[int, Verdict]] = {
    errno.EINTR: Verdict.RETRY,
    errno.ENOBUFS: Verdict.REPEAT,  # not BLOCKED: the socket stays writable, and whoever polls would spin
    errno.ECONNREFUSED: Verdict.REPEAT,  # an answer to an earlier packet; reporting it clears it
    errno.EAGAIN: Verdict.BLOCKED,
    errno.EWOULDBLOCK: Verdict.BLOCKED,
    errno.EBADF: Verdict.BROKEN,
    EBADFD: Verdict.BROKEN,
    errno.ENXIO: Verdict.BROKEN,
    errno.ENODEV: Verdict.BROKEN,
    errno.ENOTSOCK: Verdict.BROKEN,
    errno.EFAULT: Verdict.BROKEN,
}

#: An optional or private call that says one of these is not there for us (protocol 09, R11).
UNSUPPORTED: Final = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM})

#: Errors of a receive that say something about an earlier packet, or about now, and not about the descriptor: reporting
#: them clears them (protocol 09, 5.2). All others end the reader.
PASSING_RECEIVE: Final = frozenset(
    {
        errno.EINTR,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.EHOSTUNREACH,
        errno.ENETUNREACH,
        errno.ENETDOWN,
        errno.EMSGSIZE,
        errno.ENOBUFS,
        errno.ENOMEM,
        errno.EPROTO,
        errno.ETIMEDOUT,
    }
)

_said: set[str] = set()  # one entry for each call of a system, so bounded by the program text
_said_lock = threading.Lock()


def log_once(key: str, message: str, *args: object) -> None:
    """A warning, the first time in this process that it is given for `key`."""
    if _is_new(key):
        log.warning(message, *args)


def say_once(key: str, message: str, *args: object) -> None:
    """The same for what is no reason to worry."""
    if _is_new(key):
        log.info(message, *args)


def _is_new(key: str) -> bool:
    with _said_lock:
        if key in _said:
            return False
        _said.add(key)
        return True


def forget_what_was_logged() -> None:
    """For tests."""
    with _said_lock:
        _said.clear()


def describe(error: int) -> str:
    """`EMSGSIZE`, or the number where it has no name."""
    return errno.errorcode.get(error, str(error))
