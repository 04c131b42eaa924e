"""The options of an interface that tells others of itself, and which interfaces can.  Protocol 06, section 2.5."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, Final

from rnsfast.crypto.stamp import MAX_COST
from rnsfast.interfaces.base import Section
from rnsfast.wire.discovery import DEFAULT_COST

log = logging.getLogger(__name__)

INTERVAL: Final = 360  # minutes between announces of an interface
MIN_INTERVAL: Final = 5  # minutes; less is not accepted


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoveryOptions:
    """What stands in a section with `discoverable = yes`. Read only then."""

    announce_interval: float = INTERVAL * 60.0  # seconds (minutes in the file)
    stamp_cost: int = DEFAULT_COST  # bits of work
    name: str | None = None
    encrypt: bool = False  # to the network identity
    reachable_on: str | None = None  # an address, a host name, or a program that prints one
    publish_ifac: bool = False
    network_name: str | None = None  # of the access codes, for `publish_ifac`
    passphrase: str | None = field(default=None, repr=False)
    latitude: float | None = None
    longitude: float | None = None
    height: float | None = None
    location_program: str | None = None  # prints latitude, longitude and height
    operator: bytes | None = None  # 16 bytes, an LXMF address
    frequency: int | None = None  # Hz; of radio types that do not know it themselves
    bandwidth: int | None = None  # Hz
    modulation: int | None = None

    @classmethod
    def from_section(cls, section: Section, network_name: str | None, passphrase: str | None) -> DiscoveryOptions:
        """Raises ConfigError."""
        publish = section.boolean("publish_ifac", False)
        if publish and network_name is None and passphrase is None:
            log.warning("[[%s]]: publish_ifac: there are no access codes to publish", section.name)
            publish = False
        minutes = section.integer("announce_interval", default=INTERVAL)
        return cls(
            announce_interval=max(minutes, MIN_INTERVAL) * 60.0,
            stamp_cost=section.integer("discovery_stamp_value", 0, MAX_COST, default=DEFAULT_COST),
            name=section.text("discovery_name", None),
            encrypt=section.boolean("discovery_encrypt", False),
            reachable_on=section.text("reachable_on", None),
            publish_ifac=publish,
            network_name=network_name if publish else None,
            passphrase=passphrase if publish else None,
            latitude=section.number("latitude", -90.0, 90.0, default=None),
            longitude=section.number("longitude", -180.0, 180.0, default=None),
            height=section.number("height", default=None),
            location_program=section.text("location_cmd", None),
            operator=_operator(section),
            frequency=section.integer("discovery_frequency", 0, None, default=None),
            bandwidth=section.integer("discovery_bandwidth", 0, None, default=None),
            modulation=section.integer("discovery_modulation", 0, None, default=None),
        )


def _operator(section: Section) -> bytes | None:
    text = section.text("discovery_lxmf_address", None)
    if text is None:
        return None
    try:
        address = bytes.fromhex(text)
    except ValueError:
        address = b""
    if len(address) == 16:
        return address
    log.warning("[[%s]]: discovery_lxmf_address: ignored, accepted are 32 hexadecimal digits", section.name)
    return None


@dataclass(frozen=True, slots=True)
class Published:
    """An interface that tells others of itself."""

    interface: Any
    kind: str  # the type it is published as
    port: int | None  # where it listens
    options: DiscoveryOptions


def published(interface: Any) -> Published | None:
    """How an interface tells others of itself, None if it does not.

    Those that listen for connections can, and a TCPClientInterface whose other end is a TNC.
    """
    settings: Any = getattr(interface, "settings", None)
    options = getattr(getattr(settings, "common", None), "discovery", None)
    if options is None:
        return None
    kind = getattr(interface, "kind", "")
    if kind in ("TCPServerInterface", "BackboneInterface"):
        address = getattr(interface, "address", None)  # the port the system chose, if it was left to it
        port = settings.port or (address[1] if isinstance(address, tuple) else None)
        return Published(interface, kind, port, options)
    if kind == "TCPClientInterface" and interface.config.kiss_framing:
        return Published(interface, "KISSInterface", None, options)
    return None
