"""The life of a link: which cause moves it from which state to which.  Protocol 03, section 7.1."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, IntEnum, auto
from typing import Final


class State(IntEnum):
    """Numbers are public API (protocol 03, section 1)."""

    PENDING = 0  # initiator: request sent
    HANDSHAKE = 1  # responder: proof sent
    ACTIVE = 2
    STALE = 3  # nothing heard for too long; one more chance
    CLOSED = 4


class Reason(IntEnum):
    """Why a link was closed. Numbers are public API (protocol 03, section 1)."""

    TIMEOUT = 1
    INITIATOR_CLOSED = 2
    DESTINATION_CLOSED = 3


class Cause(Enum):
    """What can happen to a link."""

    PROOF_VALID = auto()  # initiator
    ROUND_TRIP_KNOWN = auto()  # responder: the RTT packet, or the first packet that opens if that was lost
    ESTABLISHMENT_TIMEOUT = auto()
    SILENCE = auto()  # nothing heard for the stale time
    HEARD = auto()  # an authentic packet
    GRACE_OVER = auto()  # stale and still nothing
    CLOSE_LOCAL = auto()  # the application, or a channel that gave up
    CLOSE_REMOTE = auto()  # the peer said so
    PORT_LOST = auto()  # the interface the link is bound to is gone (trap T16)


class Do(Enum):
    """What a move asks for, in this order."""

    SEND_RTT = auto()
    SEND_CLOSE = auto()
    TELL_ESTABLISHED = auto()
    TELL_CLOSED = auto()


_DEATHS: Final[dict[Cause, tuple[State, tuple[Do, ...]]]] = {
    Cause.CLOSE_LOCAL: (State.CLOSED, (Do.SEND_CLOSE, Do.TELL_CLOSED)),
    Cause.CLOSE_REMOTE: (State.CLOSED, (Do.TELL_CLOSED,)),
    Cause.PORT_LOST: (State.CLOSED, (Do.TELL_CLOSED,)),
}

#: A pair that is not here changes nothing.
MOVES: Final[Mapping[tuple[State, Cause], tuple[State, tuple[Do, ...]]]] = {
    (State.PENDING, Cause.PROOF_VALID): (State.ACTIVE, (Do.SEND_RTT, Do.TELL_ESTABLISHED)),
    (State.PENDING, Cause.ESTABLISHMENT_TIMEOUT): (State.CLOSED, (Do.TELL_CLOSED,)),
    (State.PENDING, Cause.CLOSE_LOCAL): (State.CLOSED, (Do.TELL_CLOSED,)),  # nothing can be sent without keys
    (State.PENDING, Cause.PORT_LOST): (State.CLOSED, (Do.TELL_CLOSED,)),
    (State.HANDSHAKE, Cause.ROUND_TRIP_KNOWN): (State.ACTIVE, (Do.TELL_ESTABLISHED,)),
    (State.HANDSHAKE, Cause.ESTABLISHMENT_TIMEOUT): (State.CLOSED, (Do.TELL_CLOSED,)),
    **{(State.HANDSHAKE, cause): move for cause, move in _DEATHS.items()},
    (State.ACTIVE, Cause.SILENCE): (State.STALE, ()),
    **{(State.ACTIVE, cause): move for cause, move in _DEATHS.items()},
    (State.STALE, Cause.HEARD): (State.ACTIVE, ()),
    (State.STALE, Cause.GRACE_OVER): (State.CLOSED, (Do.SEND_CLOSE, Do.TELL_CLOSED)),
    **{(State.STALE, cause): move for cause, move in _DEATHS.items()},
}

# Times, all local (protocol 03, sections 8 and 13); ends must roughly agree on the keepalive.
PER_HOP_TIMEOUT: Final = 6.0  # seconds
RESPONDER_PATIENCE: Final = 360.0  # seconds a responder waits for the RTT packet, beside the hops
KEEPALIVE_MAX: Final = 360.0  # seconds, also before the round trip time is known
KEEPALIVE_MIN: Final = 5.0  # seconds
KEEPALIVE_MAX_RTT: Final = 1.75  # seconds of round trip at which the interval reaches its maximum
STALE_FACTOR: Final = 2.0  # intervals without a sign of life
STALE_GRACE: Final = 5.0  # seconds, beside four round trips
GRACE_RTT_FACTOR: Final = 4.0
#: An initiator's stale threshold is at least this: reference responders leave pings unanswered when their own round
#: trip time is longer (protocol 03, 13.2). It costs nothing on the wire.
INITIATOR_STALE_FLOOR: Final = 60.0  # seconds
TRAFFIC_TIMEOUT_FACTOR: Final = 6.0  # round trips a packet's proof may take
TRAFFIC_TIMEOUT_MIN: Final = 0.005  # seconds
UNKNOWN_HOPS: Final = 128


def keepalive_for(rtt: float) -> float:
    """Seconds between pings."""
    return min(max(rtt * (KEEPALIVE_MAX / KEEPALIVE_MAX_RTT), KEEPALIVE_MIN), KEEPALIVE_MAX)


def initiator_timeout(hops: int | None, next_hop_bitrate: float | None) -> float:
    """Seconds an initiator waits for the proof. `hops` and bitrate (bit/s) are None if no path is known."""
    first = PER_HOP_TIMEOUT
    if hops is not None and next_hop_bitrate:
        first += 500 * 8 / next_hop_bitrate
    return first + PER_HOP_TIMEOUT * max(1, UNKNOWN_HOPS if hops is None else hops)


def responder_timeout(hops: int) -> float:
    """Seconds a responder waits for the RTT packet. `hops` is the incremented count of the request."""
    return PER_HOP_TIMEOUT * max(1, hops) + RESPONDER_PATIENCE
