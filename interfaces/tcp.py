"""TCPClientInterface and TCPServerInterface.  Protocol 06, section 4."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from rnsfast.interfaces.base import Section
from rnsfast.interfaces.client import CONNECT_TIMEOUT, ClientSettings, StreamClient
from rnsfast.interfaces.common import BUILT_IN, TCP, CommonConfig, Defaults, bracketed
from rnsfast.interfaces.framing import HDLC, KISS
from rnsfast.interfaces.listener import ListenerSettings, StreamListener

MIN_FIXED_MTU: Final = 500  # bytes; every node must be able to send that much
MAX_FIXED_MTU: Final = 524_288  # bytes; the largest of the table


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpClientConfig:
    """One `[[name]]` section with `type = TCPClientInterface`.  Protocol 06, section 4.1."""

    common: CommonConfig
    target_host: str  # name or address, an IPv6 address without brackets
    target_port: int
    kiss_framing: bool = False
    i2p_tunneled: bool = False
    fixed_mtu: int | None = None  # bytes; instead of the one that goes with the bitrate
    max_reconnect_tries: int | None = None  # None: no limit
    connect_timeout: float = CONNECT_TIMEOUT  # seconds for one address

    @classmethod
    def from_section(cls, section: Section, defaults: Defaults = BUILT_IN) -> TcpClientConfig:
        """Raises ConfigError."""
        return cls(
            common=CommonConfig.from_section(section, defaults),
            target_host=section.text("target_host"),
            target_port=section.integer("target_port", 1, 65535),
            kiss_framing=section.boolean("kiss_framing", False),
            i2p_tunneled=section.boolean("i2p_tunneled", False),
            fixed_mtu=section.integer("fixed_mtu", MIN_FIXED_MTU, MAX_FIXED_MTU, default=None),
            max_reconnect_tries=section.integer("max_reconnect_tries", 0, None, default=None),
            connect_timeout=section.number("connect_timeout", 0.1, 3600.0, default=CONNECT_TIMEOUT),
        )


class TcpClientInterface(StreamClient):
    """Connects to a TCPServerInterface, a BackboneInterface or a TNC program."""

    def __init__(self, config: TcpClientConfig) -> None:
        self.config = config
        target = bracketed(config.target_host, config.target_port)
        super().__init__(
            ClientSettings(
                kind="TCPClientInterface",
                display=f"TCPInterface[{config.common.name}/{target}]",
                common=config.common,
                medium=replace(TCP, fixed_mtu=config.fixed_mtu),
                host=config.target_host,
                port=config.target_port,
                framing=KISS if config.kiss_framing else HDLC,
                wants_tunnel=not config.kiss_framing,
                i2p_tunneled=config.i2p_tunneled,
                connect_timeout=config.connect_timeout,
                max_reconnect_tries=config.max_reconnect_tries,
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpServerConfig:
    """One `[[name]]` section with `type = TCPServerInterface`.  Protocol 06, section 4.2."""

    common: CommonConfig
    listen_ip: str | None  # None only with a device
    listen_port: int  # 0 lets the system choose; not in files
    device: str | None = None
    prefer_ipv6: bool = False
    i2p_tunneled: bool = False

    @classmethod
    def from_section(cls, section: Section, defaults: Defaults = BUILT_IN) -> TcpServerConfig:
        """Raises ConfigError."""
        device = section.text("device", None)
        port = section.integer("port", 1, 65535, default=None)
        usual = section.integer("listen_port", 1, 65535, default=None) if port else None
        return cls(
            common=CommonConfig.from_section(section, defaults),
            listen_ip=section.text("listen_ip", None) if device else section.text("listen_ip"),
            listen_port=port or usual or section.integer("listen_port", 1, 65535),
            device=device,
            prefer_ipv6=section.boolean("prefer_ipv6", False),
            i2p_tunneled=section.boolean("i2p_tunneled", False),
        )


class TcpServerInterface(StreamListener):
    """Takes connections of TCPClientInterfaces and Backbone initiators."""

    def __init__(self, config: TcpServerConfig) -> None:
        self.config = config
        super().__init__(
            ListenerSettings(
                kind="TCPServerInterface",
                spawned="TCPInterface",
                common=config.common,
                medium=TCP,
                host=config.listen_ip,
                port=config.listen_port,
                device=config.device,
                prefer_ipv6=config.prefer_ipv6,
                i2p_tunneled=config.i2p_tunneled,
            )
        )
