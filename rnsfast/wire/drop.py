"""Why bytes from the network went no further: one member for each reason, whatever the layer that found it."""

from __future__ import annotations

from enum import Enum


class Drop(Enum):
    """Why bytes from the network went no further. The value is the counter's name in `status`."""

    # Enum.__hash__ is written in Python and takes three times as long; members are singletons, so identity will do.
    __hash__ = object.__hash__

    # Packets (protocol 01, 4.4)
    TOO_SHORT = "malformed.short"
    TOO_MANY_HOPS = "malformed.hops"
    NO_DATA = "malformed.empty"
    # Payload formats
    ANNOUNCE_SIZE = "malformed.announce"
    PATH_REQUEST_SIZE = "malformed.path_request"
    TUNNEL_SIZE = "malformed.tunnel"
    LINK_REQUEST_SIZE = "malformed.link_request"
    LINK_PROOF_SIZE = "malformed.link_proof"
    RTT_UNREADABLE = "malformed.rtt"
    IDENTIFY_SIZE = "malformed.identify"
    PROOF_SIZE = "malformed.proof"
    ENVELOPE_SIZE = "malformed.envelope"
    STREAM_SIZE = "malformed.stream"
    STREAM_COMPRESSION = "malformed.stream_compression"
    # Interface access codes (protocol 01, 10.3)
    IFAC_MISSING = "ifac.missing"
    IFAC_UNEXPECTED = "ifac.unexpected"
    IFAC_SHORT = "ifac.short"
    IFAC_INVALID = "ifac.invalid"
    # Framing (protocol 01, 11)
    FRAME_SHORT = "frame.short"
    FRAME_LONG = "frame.long"
    FRAME_UNFINISHED = "frame.unfinished"
