"""BackboneInterface, listener and initiator.  Protocol 06, section 5. The bytes are those of TCP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rnsfast.interfaces.base import Section
from rnsfast.interfaces.client import CONNECT_TIMEOUT, ClientSettings, StreamClient
from rnsfast.interfaces.common import BACKBONE, BUILT_IN, CommonConfig, Defaults, bracketed
from rnsfast.interfaces.listener import ListenerSettings, StreamListener

FLAPPING_THRESHOLD: Final = 20.0  # seconds; a shorter connection counts against its address
FLAPPING_GRACE: Final = 5  # short connections that do no harm
FLAPPING_BLOCK_MINUTES: Final = 720.0  # minutes since the last count until an address is forgotten
FLAPPING_ADDRESSES: Final = 4096  # addresses remembered; then the one that counted longest ago gives way


def is_initiator(section: Section) -> bool:
    """`type = BackboneInterface` connects if it has a target, and listens otherwise."""
    return bool(section.text("remote", None) or section.text("target_host", None))


@dataclass(frozen=True, slots=True, kw_only=True)
class BackboneClientConfig:
    """A Backbone section with a target.  Protocol 06, section 5."""

    common: CommonConfig
    target_host: str
    target_port: int
    prefer_ipv6: bool = False
    max_reconnect_tries: int | None = None  # None: no limit
    connect_timeout: float = CONNECT_TIMEOUT  # seconds for one address

    @classmethod
    def from_section(cls, section: Section, defaults: Defaults = BUILT_IN) -> BackboneClientConfig:
        """Raises ConfigError. The aliases `remote` and `port` win."""
        host = section.text("remote", None)
        usual_host = section.text("target_host", None)
        port = section.integer("port", 1, 65535, default=None)
        usual_port = section.integer("target_port", 1, 65535, default=None)
        section.boolean("i2p_tunneled", False)  # accepted, without effect
        return cls(
            common=CommonConfig.from_section(section, defaults),
            target_host=host or usual_host or section.text("target_host"),
            target_port=port or usual_port or section.integer("target_port", 1, 65535),
            prefer_ipv6=section.boolean("prefer_ipv6", False),
            max_reconnect_tries=section.integer("max_reconnect_tries", 0, None, default=None),
            connect_timeout=section.number("connect_timeout", 0.1, 3600.0, default=CONNECT_TIMEOUT),
        )


class BackboneClientInterface(StreamClient):
    """Connects to a BackboneInterface or TCPServerInterface."""

    def __init__(self, config: BackboneClientConfig) -> None:
        self.config = config
        target = bracketed(config.target_host, config.target_port)
        super().__init__(
            ClientSettings(
                kind="BackboneClientInterface",
                display=f"BackboneInterface[{config.common.name}/{target}]",
                common=config.common,
                medium=BACKBONE,
                host=config.target_host,
                port=config.target_port,
                prefer_ipv6=config.prefer_ipv6,
                connect_timeout=config.connect_timeout,
                max_reconnect_tries=config.max_reconnect_tries,
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FlappingRules:
    """Who connects for a moment again and again is turned away for a while."""

    enabled: bool = True
    threshold: float = FLAPPING_THRESHOLD  # seconds
    grace: int = FLAPPING_GRACE
    block_time: float = FLAPPING_BLOCK_MINUTES * 60  # seconds


class FlappingGuard:
    """Counts short connections by remote address. One may serve several listeners.

    Counts do not decay: an address is forgotten as a whole when its last count is old enough.
    """

    def __init__(self, rules: FlappingRules) -> None:
        self.rules = rules
        self._counts: dict[str, tuple[int, float]] = {}  # address -> count, when last; oldest count first

    def admits(self, host: str, now: float) -> bool:
        if not self.rules.enabled:
            return True
        entry = self._counts.get(host)
        if entry is None:
            return True
        if now - entry[1] > self.rules.block_time:
            del self._counts[host]
            return True
        return entry[0] <= self.rules.grace

    def ended(self, host: str, lasted: float, now: float) -> None:
        if not self.rules.enabled or lasted >= self.rules.threshold:
            return
        count, _ = self._counts.pop(host, (0, 0.0))
        self._counts[host] = (count + 1, now)
        if len(self._counts) > FLAPPING_ADDRESSES:
            del self._counts[next(iter(self._counts))]

    @property
    def blocked(self) -> int:
        """Addresses that are turned away, as of their last count."""
        return sum(count > self.rules.grace for count, _ in self._counts.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class BackboneConfig:
    """A Backbone section without a target.  Protocol 06, section 5."""

    common: CommonConfig
    listen_ip: str | None  # None only with a device
    listen_port: int  # 0 lets the system choose; not in files
    device: str | None = None
    prefer_ipv6: bool = False
    flapping: FlappingRules = FlappingRules()

    @classmethod
    def from_section(cls, section: Section, defaults: Defaults = BUILT_IN) -> BackboneConfig:
        """Raises ConfigError. The aliases `listen_on` and `port` win; the block time is in minutes in the file."""
        device = section.text("device", None)
        host = section.text("listen_on", None)
        usual_host = section.text("listen_ip", None)
        port = section.integer("port", 1, 65535, default=None)
        usual_port = section.integer("listen_port", 1, 65535, default=None)
        minutes = section.number("fast_flapping_block_time", 0.0, default=FLAPPING_BLOCK_MINUTES)
        return cls(
            common=CommonConfig.from_section(section, defaults),
            listen_ip=host or usual_host or (None if device else section.text("listen_ip")),
            listen_port=port or usual_port or section.integer("listen_port", 1, 65535),
            device=device,
            prefer_ipv6=section.boolean("prefer_ipv6", False),
            flapping=FlappingRules(
                enabled=section.boolean("block_fast_flapping", True),
                threshold=section.number("fast_flapping_threshold", 0.0, default=FLAPPING_THRESHOLD),
                grace=section.integer("fast_flapping_grace", 0, default=FLAPPING_GRACE),
                block_time=minutes * 60,
            ),
        )


class BackboneInterface(StreamListener):
    """Takes connections of Backbone initiators and TCPClientInterfaces."""

    def __init__(self, config: BackboneConfig, *, guard: FlappingGuard | None = None) -> None:
        self.config = config
        super().__init__(
            ListenerSettings(
                kind="BackboneInterface",
                spawned="BackboneInterface",
                common=config.common,
                medium=BACKBONE,
                host=config.listen_ip,
                port=config.listen_port,
                device=config.device,
                prefer_ipv6=config.prefer_ipv6,
            ),
            doorkeeper=guard if guard is not None else FlappingGuard(config.flapping),
        )
