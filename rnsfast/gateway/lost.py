"""Why an IP packet, or what should have been one, went no further; and why a link was not taken."""

from __future__ import annotations

from enum import Enum


class Lost(Enum):
    """The value is the counter's name in `status`. `out` is from the device to the link, `in` the other way."""

    __hash__ = object.__hash__  # members are singletons; Enum's own takes three times as long

    OUT_NO_LINK = "out.no_link"
    OUT_HEADER = "out.header"
    OUT_SOURCE = "out.source"
    OUT_MULTICAST = "out.multicast"
    OUT_LINK_LOCAL = "out.link_local"  # what kernels send on every IPv6 device by themselves
    OUT_TOO_BIG = "out.too_big"
    IN_EMPTY = "in.empty"
    IN_TYPE = "in.type_unknown"
    IN_BUNDLE = "in.bundle"
    IN_CONTROL = "in.control"
    IN_HEADER = "in.header"
    IN_SOURCE = "in.source"
    IN_MULTICAST = "in.multicast"
    IN_LINK_LOCAL = "in.link_local"
    IN_DEVICE_FULL = "in.device_full"
    IN_DEVICE_REFUSED = "in.device_refused"
    LINK_NOT_ALLOWED = "link.not_allowed"
    LINK_UNIDENTIFIED = "link.unidentified"
    LINK_BUSY = "link.busy"
    LINK_TOO_MANY = "link.too_many"
    LINK_VERSION = "link.version"
    LINK_SILENT = "link.silent"
