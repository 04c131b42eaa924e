"""The configuration of a node: which directory, which file, and what it says.  Protocol 07, sections 1 and 2.

Everything is checked once, here; behind this module values are right by construction and do not change.  A fault in
`[reticulum]` or `[logging]` is a ConfigError.  A fault in an interface section concerns that section only: see
`check_sections`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from rnsfast.engine.inbound import TrafficClass
from rnsfast.errors import ConfigError, StorageError
from rnsfast.interfaces.common import LIMITS, MODES, Defaults
from rnsfast.node.configdefault import DEFAULT_CONFIG, LAYOUT
from rnsfast.node.configfile import Section, did_you_mean, parse, read_file, unknown_options
from rnsfast.node.configkeys import LOGGING_KEYS, RETICULUM_KEYS, TYPE_KEYS
from rnsfast.node.files import atomic_write, set_aside

__all__ = [
    "MODES",
    "CheckedSections",
    "LoadedConfig",
    "NodeConfig",
    "Section",
    "check_sections",
    "ensure_layout",
    "find_config_dir",
    "load_or_create",
    "parse_config",
    "read_config",
]

T = TypeVar("T")

SYSTEM_DIRECTORY: Final = Path("/etc/reticulum")
CONFIG_NAME: Final = "config"
MAX_LOGLEVEL: Final = 8
MIN_BLACKHOLE_INTERVAL: Final = 120.0  # seconds (protocol 07, section 2.2)
_SECTIONS: Final = ("reticulum", "logging", "interfaces")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """`[reticulum]` and `[logging]`, read once at start.  Protocol 07, sections 2.2 and 2.3.

    None means not set: the built-in default of whatever uses the value applies.  In the rate and ingress options 0
    means the same (a trap of the file format: there is no global way to say nought).
    """

    # the shared instance
    share_instance: bool = True
    instance_name: str = "default"
    shared_instance_type: str | None = None  # "tcp" or "unix"
    shared_instance_port: int = 37428
    instance_control_port: int = 37429
    rpc_key: bytes | None = field(default=None, repr=False)  # any length
    force_shared_instance_bitrate: int | None = None  # bits per second
    # the core
    enable_transport: bool = False
    static_transport_identity: bool = False
    local_hops_delta: bool = False
    network_identity: Path | None = None
    link_mtu_discovery: bool = True
    use_implicit_proof: bool = True
    panic_on_interface_error: bool = False
    # management
    enable_remote_management: bool = False
    remote_management_allowed: tuple[bytes, ...] = ()  # identity hashes, 16 bytes
    respond_to_probes: bool = False
    enable_interface_management: bool = True
    # blackhole lists
    publish_blackhole: bool = False
    blackhole_sources: tuple[bytes, ...] = ()  # identity hashes, 16 bytes
    blackhole_update_interval: float = 3600.0  # seconds (minutes in the file), at least 120
    # discovery
    discover_interfaces: bool = False
    required_discovery_value: int = 16  # bits of proof of work
    interface_discovery_sources: tuple[bytes, ...] = ()  # identity hashes, 16 bytes; none: any
    autoconnect_discovered_interfaces: int = 0  # at most so many
    autoconnect_unverified_implementations: bool = False
    autoconnect_interface_mode: int | None = None  # number of the mode (protocol 06, section 2.3)
    autoconnect_interface_gravity: int | None = None
    autoconnect_announces_to_internal: bool | None = None
    # defaults of the interfaces
    default_gravity: int | None = None
    default_ar_target: int | None = None  # seconds
    default_ar_penalty: int | None = None  # seconds
    default_ar_grace: int | None = None
    ic_max_held_announces: int | None = None
    ic_burst_hold: float | None = None  # seconds
    ic_burst_penalty: float | None = None  # seconds
    ic_held_release_interval: float | None = None  # seconds
    ic_new_time: float | None = None  # seconds
    ic_burst_freq_new: float | None = None  # Hz
    ic_burst_freq: float | None = None  # Hz
    ic_pr_burst_freq_new: float | None = None  # Hz
    ic_pr_burst_freq: float | None = None  # Hz
    egress_control: bool | None = None
    ec_pr_freq: float | None = None  # Hz
    # inbound queues, packets an interface; data does not wait in one
    qlen_in_data: int | None = None
    qlen_in_announce: int | None = None
    qlen_in_pr: int | None = None
    qlen_in_il: int | None = None
    # logging
    loglevel: int = 3  # 0..8
    logtimestamps: bool = True

    def effective_loglevel(self, verbosity: int = 0, override: int | None = None) -> int:
        """The level to log at, 0..8: `override` if given, else the file's with the program's verbosity added."""
        level = override if override is not None else self.loglevel + verbosity
        return min(max(level, 0), MAX_LOGLEVEL)

    @property
    def queue_lengths(self) -> dict[TrafficClass, int]:
        """How many packets of an interface may wait for their turn, by class, where that was set."""
        lengths = {
            TrafficClass.ANNOUNCE: self.qlen_in_announce,
            TrafficClass.PATH_REQUEST: self.qlen_in_pr,
            TrafficClass.INGRESS_LIMITED: self.qlen_in_il,
        }
        return {kind: length for kind, length in lengths.items() if length is not None}

    def interface_defaults(self) -> Defaults:
        """What interface sections fall back on. Options that are not set here, or 0, leave the built-in value."""
        names = {
            "gravity": self.default_gravity,
            "rate_target": self.default_ar_target,
            "rate_penalty": self.default_ar_penalty,
            "rate_grace": self.default_ar_grace,
            "egress_control": self.egress_control,
            **{key: getattr(self, key) for key in ("ic_max_held_announces", *LIMITS)},
        }
        return Defaults(transport=self.enable_transport, **{name: value for name, value in names.items() if value})


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """What a configuration file says."""

    config: NodeConfig
    sections: list[Section]  # of [interfaces], in the order of the file, enabled or not
    warnings: list[str]  # sentences for the operator, each with file and line
    path: Path
    created: bool = False  # it was not there and has just been written


@dataclass(slots=True)
class CheckedSections(Generic[T]):
    """The interface sections, sorted by whether they can be used."""

    good: list[tuple[Section, T]] = field(default_factory=list)  # enabled and without fault
    failed: list[tuple[Section, ConfigError]] = field(default_factory=list)  # enabled, or would be but for the fault
    disabled: list[Section] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def read_config(path: Path) -> LoadedConfig:
    """Read and check the file at `path`.

    Raises:
        ConfigError: the file cannot be read or parsed, or `[reticulum]` or `[logging]` has a wrong value.

    Protocol: 07, section 2.
    """
    path = Path(path)
    root, warnings = read_file(path)
    return _load(root, warnings, path)


def parse_config(data: bytes, path: Path = Path(CONFIG_NAME)) -> LoadedConfig:
    """As `read_config` for a text that is already here; `path` is for the messages."""
    root, warnings = parse(data, path)
    return _load(root, warnings, path)


def load_or_create(directory: Path) -> LoadedConfig:
    """Read `config` in `directory`; if it is not there, write the default file first. Raises ConfigError."""
    path = Path(directory) / CONFIG_NAME
    created = not os.path.lexists(path)
    if created:
        try:
            atomic_write(path, DEFAULT_CONFIG.encode())
        except StorageError as error:
            raise ConfigError(f"{path}: there is none and it cannot be written: {error}", file=str(path)) from error
    loaded = read_config(path)
    return LoadedConfig(loaded.config, loaded.sections, loaded.warnings, path, created)


def find_config_dir(
    explicit: str | os.PathLike[str] | None = None, *, system: Path = SYSTEM_DIRECTORY, home: Path | None = None
) -> Path:
    """The configuration directory: the first of four rules that fits. Creates nothing.  Protocol 07, section 1.1.

    Args:
        explicit: the directory the program was given; used as it is, `~` is not expanded.
        system, home: other places for tests.
    """
    if explicit is not None:
        return Path(explicit)
    if home is None:
        home = Path(os.path.expanduser("~"))
    for directory in (system, home / ".config" / "reticulum"):
        if os.path.isfile(directory / CONFIG_NAME):
            return directory
    return home / ".reticulum"


def ensure_layout(directory: Path) -> None:
    """Create what is missing of the directory and its subdirectories, open to the owner only.  Protocol 07, 1.2.

    Modes of directories that exist are left as they are. Raises StorageError.
    """
    for path in (directory, *(directory / name for name in LAYOUT)):
        if path != directory and os.path.lexists(path) and not path.is_dir():
            set_aside(path, "it is not a directory", "whatever it held")
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"{path}: this directory cannot be created ({error.strerror})") from error


def check_sections(
    sections: Iterable[Section], parse_section: Callable[[Section], T], *, strict: bool = False
) -> CheckedSections[T]:
    """Check each interface section by itself, so that one fault does not hide another.

    Args:
        sections: as in `LoadedConfig.sections`.
        parse_section: makes a section into an interface's configuration and raises ConfigError for a fault.
        strict: raise the first fault of an enabled section instead of noting it.

    Returns:
        What can be used, what cannot and why, and warnings: unknown options, and faults of disabled sections.
    """
    checked: CheckedSections[T] = CheckedSections()
    for section in sections:
        enabled = True  # a section whose `enabled` cannot be read was meant to be
        try:
            enabled = section.enabled
            value = parse_section(section)
        except ConfigError as error:
            if not enabled:
                checked.disabled.append(section)
                checked.warnings.append(f"{error} (no harm now: the section is not enabled)")
            elif strict:
                raise
            else:
                checked.failed.append((section, error))
            if not _known_type(section):
                continue  # with no idea of the type every option would look unknown
        else:
            if enabled:
                checked.good.append((section, value))
            else:
                checked.disabled.append(section)
        checked.warnings += section.unknown()
    return checked


def _known_type(section: Section) -> bool:
    try:
        return section.kind in TYPE_KEYS
    except ConfigError:
        return False


# -- from sections to values ------------------------------------------------------------------------------------------


def _load(root: Section, warnings: list[str], path: Path) -> LoadedConfig:
    found: dict[str, Section] = {}
    for key in root.keys:
        if key in _SECTIONS:
            raise ConfigError(
                f"{path.name}:{root.line_of(key)}: {key}: is a value here, the section [{key}] is accepted",
                file=str(path),
                line=root.line_of(key),
                key=key,
            )
        warnings.append(f"{path.name}:{root.line_of(key)}: {key}: stands before the first [section] and has no effect")
    for child in root.children:
        if child.name in _SECTIONS:
            found[child.name] = child
        else:
            hint = did_you_mean(child.name, _SECTIONS)
            warnings.append(f"{path.name}:{child.line}: unknown section {child.title}{hint}")
    if not root.keys and not root.children:
        warnings.append(f"{path.name}: says nothing, so the defaults apply and there are no interfaces")
    absent = {name: Section(name, path, 0, 1, None, {}) for name in _SECTIONS}
    config = _node_config(
        found.get("reticulum", absent["reticulum"]), found.get("logging", absent["logging"]), warnings
    )
    interfaces = found.get("interfaces", absent["interfaces"])
    warnings += [
        interfaces.note(key, "stands before the first [[section]] and has no effect") for key in interfaces.keys
    ]
    return LoadedConfig(config, interfaces.children, warnings, path)


def _node_config(main: Section, logging: Section, warnings: list[str]) -> NodeConfig:
    flag, whole = main.boolean, main.integer
    values: dict[str, Any] = {
        "instance_name": main.text("instance_name", "default"),
        "shared_instance_type": _shared_type(main, warnings),
        "shared_instance_port": whole("shared_instance_port", 1, 65535, 37428),
        "instance_control_port": whole("instance_control_port", 1, 65535, 37429),
        "rpc_key": _rpc_key(main, warnings),
        "force_shared_instance_bitrate": whole("force_shared_instance_bitrate", 1, None, None),
        "network_identity": _path(main, "network_identity"),
        "blackhole_update_interval": max(
            main.number("blackhole_update_interval", default=60.0) * 60.0, MIN_BLACKHOLE_INTERVAL
        ),
        "required_discovery_value": _positive(whole("required_discovery_value", default=None)) or 16,
        "autoconnect_discovered_interfaces": max(whole("autoconnect_discovered_interfaces", default=0), 0),
        "autoconnect_interface_mode": _mode(main, warnings),
        "loglevel": _loglevel(logging, warnings),
        "logtimestamps": logging.boolean("logtimestamps", True),
    }
    for key in ("share_instance", "link_mtu_discovery", "use_implicit_proof", "enable_interface_management"):
        values[key] = flag(key, True)
    for key in (
        "enable_transport",
        "static_transport_identity",
        "local_hops_delta",
        "panic_on_interface_error",
        "enable_remote_management",
        "respond_to_probes",
        "publish_blackhole",
        "discover_interfaces",
        "autoconnect_unverified_implementations",
    ):
        values[key] = flag(key, False)
    for key in ("egress_control", "autoconnect_announces_to_internal"):
        values[key] = flag(key, None)
    for key in ("default_gravity", "autoconnect_interface_gravity"):
        values[key] = whole(key, default=None)
    for key in ("qlen_in_data", "qlen_in_announce", "qlen_in_pr", "qlen_in_il", "default_ar_target"):
        values[key] = _positive(whole(key, default=None))
    for key in ("default_ar_penalty", "default_ar_grace", "ic_max_held_announces"):
        values[key] = _not_negative(whole(key, default=None))
    for key in LIMITS:
        values[key] = _not_negative(main.number(key, default=None))
    for key in ("remote_management_allowed", "blackhole_sources", "interface_discovery_sources"):
        values[key] = _hashes(main, key)
    if values["respond_to_probes"] and not values["enable_transport"]:
        warnings.append(main.note("respond_to_probes", "has no effect without enable_transport"))
    if values["qlen_in_data"] is not None:
        warnings.append(main.note("qlen_in_data", "has no effect: data is handled before more is read"))
    if values["autoconnect_discovered_interfaces"] and not values["discover_interfaces"]:
        warnings.append(main.note("autoconnect_discovered_interfaces", "has no effect without discover_interfaces"))
    warnings += unknown_options(main, RETICULUM_KEYS)
    warnings += unknown_options(logging, LOGGING_KEYS)
    return NodeConfig(**values)


Number = TypeVar("Number", int, float)


def _positive(value: Number | None) -> Number | None:
    return value if value is not None and value > 0 else None


def _not_negative(value: Number | None) -> Number | None:
    return value if value is not None and value >= 0 else None


def _loglevel(logging: Section, warnings: list[str]) -> int:
    level = logging.integer("loglevel", default=3)
    clamped = min(max(level, 0), MAX_LOGLEVEL)
    if clamped != level:
        warnings.append(logging.note("loglevel", f"{level} is not within 0..{MAX_LOGLEVEL}, {clamped} is used"))
    return clamped


def _shared_type(main: Section, warnings: list[str]) -> str | None:
    word = main.text("shared_instance_type", None)
    if word is None or word.lower() in ("tcp", "unix"):
        return word and word.lower()
    warnings.append(main.note("shared_instance_type", f"{word!r} is ignored, accepted is tcp or unix"))
    return None


def _rpc_key(main: Section, warnings: list[str]) -> bytes | None:
    text = main.text("rpc_key", None)
    if text is None:
        return None
    try:
        return bytes.fromhex(text)
    except ValueError:
        warnings.append(
            main.note(
                "rpc_key",
                "the value is ignored, accepted is an even number of hexadecimal digits; the key made"
                " from the transport identity is used",
            )
        )
        return None


def _path(main: Section, key: str) -> Path | None:
    text = main.text(key, None)
    return None if text is None else Path(os.path.expanduser(text))


def _mode(main: Section, warnings: list[str]) -> int | None:
    try:
        return main.choice("autoconnect_interface_mode", MODES, None)
    except ConfigError as error:  # other implementations ignore a word they do not know; a list is an error there too
        if len(main.words("autoconnect_interface_mode")) > 1:
            raise
        warnings.append(f"{error}; it is ignored")
        return None


def _hashes(main: Section, key: str) -> tuple[bytes, ...]:
    hashes: dict[bytes, None] = {}  # in the order of the file, each once
    for word in main.words(key):
        try:
            value = bytes.fromhex(word)
        except ValueError:
            value = b""
        if len(value) != 16 or len(word) != 32:
            raise main.fail(key, f"{word!r} is not an identity hash, accepted are 32 hexadecimal digits each")
        hashes[value] = None
    return tuple(hashes)
