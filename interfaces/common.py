"""The options every interface has, and the port they describe.  Protocol 06, sections 1.4, 1.5, 2.2, 2.3 and 2.5."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final

from rnsfast.engine.port import Policy, Port
from rnsfast.interfaces.base import Section
from rnsfast.interfaces.discovery import DiscoveryOptions
from rnsfast.wire.ifac import IfacKey
from rnsfast.wire.mtu import hw_mtu_for_bitrate

FULL, POINT_TO_POINT, ACCESS_POINT, ROAMING, BOUNDARY, GATEWAY, INTERNAL = range(1, 8)

#: Every accepted word for a mode (protocol 06, section 2.3).
MODES: Final[Mapping[str, int]] = {
    "full": FULL,
    "pointtopoint": POINT_TO_POINT,
    "ptp": POINT_TO_POINT,
    "access_point": ACCESS_POINT,
    "accesspoint": ACCESS_POINT,
    "ap": ACCESS_POINT,
    "roaming": ROAMING,
    "boundary": BOUNDARY,
    "gateway": GATEWAY,
    "gw": GATEWAY,
    "internal": INTERNAL,
}

SLOW_MTU: Final = 500  # bytes a packet below 62,500 bit/s, where the table has no row; not upgradable by links
MIN_BITRATE: Final = 5  # bit/s; lower ones are ignored
MAX_BATCH: Final = 128  # packets a system call; some back ends take fewer (protocol 09, section 11)
MAX_IFAC_BYTES: Final = 64  # an Ed25519 signature has no more


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """What applies when a section does not say: the built-in values, or those of `[reticulum]`."""

    transport: bool = False  # a transport node always limits announce rates
    gravity: int = 0
    rate_target: int = 3600  # seconds; these three apply if `transport`
    rate_penalty: int = 0  # seconds
    rate_grace: int = 5
    egress_control: bool = False
    ic_max_held_announces: int = 256
    ic_burst_hold: float = 15.0  # seconds
    ic_burst_penalty: float = 15.0  # seconds
    ic_held_release_interval: float = 5.0  # seconds
    ic_new_time: float = 7200.0  # seconds
    ic_burst_freq_new: float = 3.0  # per second
    ic_burst_freq: float = 10.0
    ic_pr_burst_freq_new: float = 3.0
    ic_pr_burst_freq: float = 8.0
    ec_pr_freq: float = 5.0


BUILT_IN: Final = Defaults()

LIMITS: Final = (
    "ic_burst_hold",
    "ic_burst_penalty",
    "ic_held_release_interval",
    "ic_new_time",
    "ic_burst_freq_new",
    "ic_burst_freq",
    "ic_pr_burst_freq_new",
    "ic_pr_burst_freq",
    "ec_pr_freq",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonConfig:
    """The options of any `[[name]]` section, checked and with the defaults filled in.  Protocol 06, section 2.2."""

    name: str
    mode: int = FULL
    outgoing: bool = True
    bitrate: int | None = None  # bit/s; None: that of the type
    gravity: int = 0
    network_name: str | None = None
    passphrase: str | None = field(default=None, repr=False)
    ifac_size: int | None = None  # bytes (bits in the file); None: that of the type
    announce_cap: float = 0.02  # fraction of the bitrate (percent in the file)
    announce_rate_target: int | None = None  # seconds
    announce_rate_grace: int | None = None
    announce_rate_penalty: int | None = None  # seconds
    ingress_control: bool = True
    egress_control: bool = False
    ic_max_held_announces: int = BUILT_IN.ic_max_held_announces
    ic_burst_hold: float = BUILT_IN.ic_burst_hold
    ic_burst_penalty: float = BUILT_IN.ic_burst_penalty
    ic_held_release_interval: float = BUILT_IN.ic_held_release_interval
    ic_new_time: float = BUILT_IN.ic_new_time
    ic_burst_freq_new: float = BUILT_IN.ic_burst_freq_new
    ic_burst_freq: float = BUILT_IN.ic_burst_freq
    ic_pr_burst_freq_new: float = BUILT_IN.ic_pr_burst_freq_new
    ic_pr_burst_freq: float = BUILT_IN.ic_pr_burst_freq
    ec_pr_freq: float = BUILT_IN.ec_pr_freq
    bootstrap_only: bool = False
    recursive_prs: bool = False
    announces_from_internal: bool = True
    announces_to_internal: bool | None = None
    discovery: DiscoveryOptions | None = None  # None: it tells nobody of itself
    batch: int | None = None  # packets handed to the system together; None: as the back end prefers

    @property
    def discoverable(self) -> bool:
        """Whether it tells others of itself."""
        return self.discovery is not None

    @classmethod
    def from_section(cls, section: Section, defaults: Defaults = BUILT_IN, *, radio: bool = False) -> CommonConfig:
        """Read the common options. `radio` types become access points when they are discoverable, others gateways."""
        values: dict[str, Any] = {}
        discoverable = section.boolean("discoverable", False)
        keep_mode = section.boolean("ignore_config_warnings", False)
        mode = _mode(section)
        if discoverable and not keep_mode and mode not in (GATEWAY, ACCESS_POINT, INTERNAL):
            mode = ACCESS_POINT if radio else GATEWAY
        for key in LIMITS:
            values[key] = section.number(key, default=getattr(defaults, key))
        target, grace, penalty = _announce_rate(section, defaults)
        network_name = section.text("network_name", None) or section.text("networkname", None)
        passphrase = section.text("pass_phrase", None) or section.text("passphrase", None)
        return cls(
            name=section.name,
            mode=mode,
            outgoing=section.boolean("outgoing", True),
            bitrate=_at_least(section.integer("bitrate", default=None), MIN_BITRATE),
            gravity=section.integer("gravity", default=defaults.gravity),
            network_name=network_name,
            passphrase=passphrase,
            ifac_size=_ifac_size(section),
            announce_cap=_announce_cap(section),
            announce_rate_target=target,
            announce_rate_grace=grace,
            announce_rate_penalty=penalty,
            ingress_control=section.boolean("ingress_control", True),
            egress_control=section.boolean("egress_control", defaults.egress_control),
            ic_max_held_announces=section.integer("ic_max_held_announces", default=defaults.ic_max_held_announces),
            bootstrap_only=section.boolean("bootstrap_only", False),
            recursive_prs=section.boolean("recursive_prs", False),
            announces_from_internal=section.boolean("announces_from_internal", True),
            announces_to_internal=section.boolean("announces_to_internal", None),
            discovery=DiscoveryOptions.from_section(section, network_name, passphrase) if discoverable else None,
            batch=section.integer("batch", 1, MAX_BATCH, default=None),
            **values,
        )

    @classmethod
    def by_defaults(cls, name: str, defaults: Defaults, **values: Any) -> CommonConfig:
        """As a section of that name would have it that says no more than `values`."""
        rates: dict[str, int | None] = {}
        if defaults.transport:
            rates = {
                "announce_rate_target": defaults.rate_target,
                "announce_rate_grace": defaults.rate_grace,
                "announce_rate_penalty": defaults.rate_penalty,
            }
        shared = ("gravity", "egress_control", "ic_max_held_announces", *LIMITS)
        return cls(name=name, **{**{key: getattr(defaults, key) for key in shared}, **rates, **values})


def _mode(section: Section) -> int:
    """`interface_mode` wins over `mode`. A word that is no mode is refused: elsewhere it silently means full."""
    chosen = section.choice("interface_mode", MODES, None)
    usual = section.choice("mode", MODES, FULL)
    return usual if chosen is None else chosen


def _at_least(value: int | None, low: int) -> int | None:
    return None if value is None or value < low else value


def _ifac_size(section: Section) -> int | None:
    bits = section.integer("ifac_size", default=None)
    if bits is None or bits < 8:
        return None
    if bits // 8 > MAX_IFAC_BYTES:
        raise section.fail(
            "ifac_size", f"{bits} bits are more than a signature has; accepted is 8..{8 * MAX_IFAC_BYTES}"
        )
    return bits // 8


def _announce_cap(section: Section) -> float:
    percent = section.number("announce_cap", default=2.0)
    return percent / 100 if 0 < percent <= 100 else 0.02


def _announce_rate(section: Section, defaults: Defaults) -> tuple[int | None, int | None, int | None]:
    """Target, grace and penalty. A target alone makes the others 0; a transport node has a target in any case."""
    target = _at_least(section.integer("announce_rate_target", default=None), 1)
    grace = _at_least(section.integer("announce_rate_grace", default=None), 0)
    penalty = _at_least(section.integer("announce_rate_penalty", default=None), 0)
    if target is not None:
        return target, grace or 0, penalty or 0
    if not defaults.transport:
        return None, grace, penalty
    grace = defaults.rate_grace if grace is None else grace
    return defaults.rate_target, grace, defaults.rate_penalty if penalty is None else penalty


@dataclass(frozen=True, slots=True, kw_only=True)
class Medium:
    """What a type of interface brings along.  Protocol 06, section 1.4."""

    bitrate: int  # bit/s
    ifac_size: int  # bytes
    fixed_mtu: int | None = None  # bytes a packet, whatever the bitrate
    upgradable: bool = True  # whether links over it may have more than 500 bytes (protocol 06, 1.4)


TCP: Final = Medium(bitrate=10_000_000, ifac_size=16)
UDP: Final = Medium(bitrate=10_000_000, ifac_size=16, fixed_mtu=1064, upgradable=False)
BACKBONE: Final = Medium(bitrate=100_000_000, ifac_size=16)

#: What of the configuration is the port's policy, under the same names.
_POLICY: Final = tuple(item.name for item in fields(Policy))


def ifac_key(config: CommonConfig, medium: Medium) -> IfacKey | None:
    """The access code key, or None without network name and passphrase. Takes a millisecond: once an interface."""
    if config.network_name is None and config.passphrase is None:
        return None
    return IfacKey(config.network_name, config.passphrase, config.ifac_size or medium.ifac_size)


def make_port(display: str, config: CommonConfig, medium: Medium, ifac: IfacKey | None) -> Port:
    """A port with everything the configuration says about it. Its hash is that of `display` (protocol 06, 1.5)."""
    bitrate = config.bitrate or medium.bitrate
    table = hw_mtu_for_bitrate(bitrate) if medium.fixed_mtu is None else medium.fixed_mtu
    return Port(
        display,
        mode=config.mode,
        bitrate=bitrate,
        hw_mtu=SLOW_MTU if table is None else table,
        upgradable=medium.upgradable and table is not None,
        ifac=ifac,
        ifac_size=config.ifac_size or medium.ifac_size,
        outgoing=config.outgoing,
        gravity=config.gravity,
        policy=Policy(**{key: getattr(config, key) for key in _POLICY}),
    )


def bracketed(host: str, port: int | str) -> str:
    """HOST:PORT for display and for the hash; a host with colons gets brackets and is otherwise left as configured."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
