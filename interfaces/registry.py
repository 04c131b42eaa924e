"""Which interface a configuration section describes.  Protocol 06, section 2."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from rnsfast.interfaces.backbone import (
    BackboneClientConfig,
    BackboneClientInterface,
    BackboneConfig,
    BackboneInterface,
    is_initiator,
)
from rnsfast.interfaces.base import Interface, Section
from rnsfast.interfaces.common import BUILT_IN, Defaults
from rnsfast.interfaces.tcp import TcpClientConfig, TcpClientInterface, TcpServerConfig, TcpServerInterface
from rnsfast.interfaces.tun import TunConfig, TunInterface
from rnsfast.interfaces.udp import UdpConfig, UdpInterface


@dataclass(frozen=True, slots=True)
class InterfaceType:
    """A type that can be built: `interface(config(section, defaults))`."""

    config: Callable[[Section, Defaults], Any]
    interface: Callable[[Any], Interface]


TCP_CLIENT: Final = InterfaceType(TcpClientConfig.from_section, TcpClientInterface)
TCP_SERVER: Final = InterfaceType(TcpServerConfig.from_section, TcpServerInterface)
BACKBONE_LISTENER: Final = InterfaceType(BackboneConfig.from_section, BackboneInterface)
BACKBONE_CLIENT: Final = InterfaceType(BackboneClientConfig.from_section, BackboneClientInterface)
UDP: Final = InterfaceType(UdpConfig.from_section, UdpInterface)
TUN: Final = InterfaceType(TunConfig.from_section, TunInterface)

#: Type names and what they stand for. BackboneInterface is two: see `lookup`.
TYPES: Final[Mapping[str, InterfaceType]] = {
    "TCPClientInterface": TCP_CLIENT,
    "TCPServerInterface": TCP_SERVER,
    "BackboneInterface": BACKBONE_LISTENER,
    "BackboneClientInterface": BACKBONE_CLIENT,
    "UDPInterface": UDP,
    "TUNInterface": TUN,
}

#: Types of the reference that are not built here yet.
NOT_YET: Final = (
    "AutoInterface",
    "PipeInterface",
    "SerialInterface",
    "KISSInterface",
    "AX25KISSInterface",
    "RNodeInterface",
    "RNodeMultiInterface",
    "I2PInterface",
    "WeaveInterface",
)


def lookup(section: Section) -> InterfaceType:
    """The type a section asks for. Raises ConfigError: no type, an unknown one, or one that is not built yet."""
    name = section.text("type")
    if name == "BackboneInterface" and is_initiator(section):
        return BACKBONE_CLIENT
    found = TYPES.get(name)
    if found is not None:
        return found
    offered = ", ".join(TYPES)
    if name in NOT_YET:
        raise section.fail("type", f"{name} is not available in this version yet; available are {offered}")
    raise section.fail("type", f"{name!r} is not a known interface type; available are {offered}")


def parse(section: Section, defaults: Defaults = BUILT_IN) -> Callable[[], Interface]:
    """Check a section completely; what comes back makes the interface. Raises ConfigError."""
    kind = lookup(section)
    config = kind.config(section, defaults)
    return lambda: kind.interface(config)
