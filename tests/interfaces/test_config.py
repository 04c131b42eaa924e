"""Sections of the configuration file: what is accepted, what it becomes, and the sentences for what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest

from rnsfast.errors import ConfigError
from rnsfast.interfaces import registry
from rnsfast.interfaces.backbone import (
    BackboneClientConfig,
    BackboneClientInterface,
    BackboneConfig,
    BackboneInterface,
)
from rnsfast.interfaces.base import Interface, Section
from rnsfast.interfaces.common import BUILT_IN, CommonConfig, Defaults, Medium, ifac_key, make_port
from rnsfast.interfaces.framing import HDLC, KISS
from rnsfast.interfaces.tcp import TcpClientConfig, TcpClientInterface, TcpServerConfig, TcpServerInterface
from rnsfast.node.config import parse_config
from tests.vectors_support import Case, unhex, vectors

#: The test type of the vectors.
PROBE = Medium(bitrate=62_500, ifac_size=8)

#: Where the reference crashes, ignores or breaks and a clear answer is better (protocol 06, sections 2.2 to 2.4).
REFUSED_HERE = {"nonsense", "point_to_point"}


def section(options: dict[str, str], name: str = "x") -> Section:
    lines = "".join(f"    {key} = {value}\n" for key, value in options.items())
    loaded = parse_config(f"[interfaces]\n  [[{name}]]\n{lines}".encode())
    return loaded.sections[0]


def tcp(**options: str) -> Section:
    return section({"type": "TCPClientInterface", "target_host": "h.example", "target_port": "4242", **options})


def build(options: dict[str, str]) -> Interface:
    return registry.parse(section(options))()


# -- common options -----------------------------------------------------------------------------------------------

#: Attribute in the vectors -> ours, where the names differ.
RENAMED = {"OUT": "outgoing", "ifac_netname": "network_name", "ifac_netkey": "passphrase"}
OURS = (
    *("mode", "gravity", "OUT", "ifac_netname", "ifac_netkey", "announce_cap", "announce_rate_target"),
    *("announce_rate_grace", "announce_rate_penalty", "ingress_control", "egress_control", "ic_max_held_announces"),
    *("ic_burst_hold", "ic_burst_freq_new", "ic_burst_freq", "ic_pr_burst_freq_new", "ic_pr_burst_freq", "ec_pr_freq"),
    *("ic_new_time", "ic_burst_penalty", "ic_held_release_interval", "bootstrap_only", "recursive_prs"),
    *("announces_from_internal", "announces_to_internal", "discoverable"),
)


def check_against(case: Case, defaults: dict[str, Any], built_in: Defaults) -> None:
    options = case["section"]
    radio = options.get("type") == "RNodeInterface"
    if case["outcome"] == "exception" and "interface_mode" not in options:
        if "discovery_modulation" not in options:  # discovery options are not read here
            with pytest.raises(ConfigError):
                CommonConfig.from_section(section(options), built_in, radio=radio)
        return
    if case["outcome"] == "no interface" and "a, b" in options.values():
        with pytest.raises(ConfigError, match="comma"):
            CommonConfig.from_section(section(options), built_in)
        return
    if case["outcome"] not in ("interface", "exception"):
        return  # decided by the node, not by the common options
    if REFUSED_HERE & {options.get("mode"), options.get("interface_mode")} or options.get("ifac_size") == "4096":
        with pytest.raises(ConfigError, match="accepted is"):
            CommonConfig.from_section(section(options), built_in)
        return
    common = CommonConfig.from_section(section(options), built_in, radio=radio)
    expected = defaults | case.get("changed", {})
    if case["outcome"] == "exception":
        expected = defaults | {"mode": 6}  # interface_mode = gateway, which we accept
    for key in OURS:
        assert getattr(common, RENAMED.get(key, key)) == expected[key], key
    port = make_port("Probe", common, PROBE, None)
    assert port.bitrate == expected["bitrate"]
    assert port.hw_mtu == (expected["HW_MTU"] or 500)
    assert port.upgradable is (expected["HW_MTU"] is not None)
    assert port.ifac_size == expected["ifac_size"]
    assert (port.mode, port.outgoing) == (common.mode, common.outgoing)


@pytest.mark.parametrize("case", vectors("interfaces", "config", "cases"), ids=lambda case: str(case["section"])[:70])
def test_common_options_become_what_the_reference_makes_of_them(case: Case) -> None:
    check_against(case, vectors("interfaces", "config", "default"), BUILT_IN)


@pytest.mark.parametrize("case", vectors("interfaces", "config_transport_enabled", "cases"))
def test_transport_nodes_always_limit_announce_rates(case: Case) -> None:
    check_against(case, vectors("interfaces", "config_transport_enabled", "default"), Defaults(transport=True))


def test_interface_mode_wins_and_all_words_count_under_both_keys() -> None:
    for key in ("mode", "interface_mode"):
        assert CommonConfig.from_section(tcp(**{key: "GW"})).mode == 6
    assert CommonConfig.from_section(tcp(mode="full", interface_mode="internal")).mode == 7


def test_unknown_mode_is_refused_by_name_with_the_list() -> None:
    with pytest.raises(ConfigError) as failure:
        CommonConfig.from_section(tcp(interface_mode="gatway"))
    message = str(failure.value)
    assert re.match(r"config:\d+: \[\[x\]\]: interface_mode: 'gatway'", message)
    for word in ("full", "gateway", "gw", "internal", "access_point", "roaming", "boundary", "ptp"):
        assert word in message


def test_passphrase_never_shows_in_a_representation() -> None:
    common = CommonConfig.from_section(tcp(passphrase="secret word", network_name="net"))
    assert common.passphrase == "secret word"
    assert "secret" not in repr(common)


def test_access_code_key_has_the_size_of_the_section_or_the_type() -> None:
    assert ifac_key(CommonConfig(name="x"), PROBE) is None
    for size, expected in ((None, 8), (4, 4)):
        key = ifac_key(CommonConfig(name="x", network_name="n", ifac_size=size), PROBE)
        assert key is not None
        assert key.size == expected


@pytest.mark.parametrize("case", vectors("interfaces", "mtu", "autoconfigure"), ids=lambda case: str(case["bitrate"]))
def test_mtu_follows_the_bitrate(case: Case) -> None:
    client = TcpClientInterface(TcpClientConfig.from_section(tcp(bitrate=str(case["bitrate"]))))
    assert client.port.hw_mtu == (case["hw_mtu"] or 500)
    assert client.port.upgradable is (case["hw_mtu"] is not None)


# -- types --------------------------------------------------------------------------------------------------------


def test_defaults_of_the_types() -> None:
    listen = {"listen_ip": "127.0.0.1", "listen_port": "4242"}
    connect = {"target_host": "h", "target_port": "1"}
    mtu = {"TCPClientInterface": 16384, "BackboneClientInterface": 32768}
    for case in vectors("interfaces", "classes"):
        name = case["class"]
        if name in mtu:
            port = build({"type": name, **connect}).ports[0]
            assert (port.bitrate, port.ifac_size) == (case["bitrate_guess"], case["default_ifac_size"])
            assert (port.hw_mtu, port.upgradable) == (mtu[name], True)
    assert isinstance(build({"type": "TCPServerInterface", **listen}), TcpServerInterface)


@pytest.mark.parametrize("case", vectors("interfaces", "backbone_config"), ids=lambda case: str(case["options"]))
def test_backbone_aliases(case: Case) -> None:
    made = build(case["options"])
    sees = case["sees"]
    assert type(made).__name__ == case["class"]
    if isinstance(made, BackboneClientInterface):
        assert (made.config.target_host, made.config.target_port) == (sees["target_host"], int(sees["target_port"]))
        assert made.port.wants_tunnel
    else:
        assert isinstance(made, BackboneInterface)
        assert made.config.listen_port == int(sees["listen_port"])
        assert (made.config.listen_ip, made.config.device) == (sees.get("listen_ip"), sees.get("device"))


CLASSES = {
    "TCPClientInterface": lambda name, a: TcpClientInterface(
        TcpClientConfig(common=CommonConfig(name=name), target_host=a["target_ip"], target_port=int(a["target_port"]))
    ),
    "BackboneClientInterface": lambda name, a: BackboneClientInterface(
        BackboneClientConfig(
            common=CommonConfig(name=name), target_host=a["target_ip"], target_port=int(a["target_port"])
        )
    ),
    "TCPServerInterface": lambda name, a: TcpServerInterface(
        TcpServerConfig(common=CommonConfig(name=name), listen_ip=a["bind_ip"], listen_port=a["bind_port"])
    ),
    "BackboneInterface": lambda name, a: BackboneInterface(
        BackboneConfig(common=CommonConfig(name=name), listen_ip=a["bind_ip"], listen_port=a["bind_port"])
    ),
}


@pytest.mark.parametrize(
    "case", [case for case in vectors("interfaces", "names") if case["class"] in CLASSES], ids=lambda case: case["case"]
)
def test_names_and_hashes(case: Case) -> None:
    made = CLASSES[case["class"]](case["attributes"]["name"], case["attributes"])
    if case["class"] in ("TCPServerInterface", "BackboneInterface"):
        assert made.display == case["str"]
    else:
        assert made.port.name == case["str"]
        assert made.port.hash == unhex(case["hash"])


def test_tcp_client_options() -> None:
    read = TcpClientConfig.from_section(
        tcp(kiss_framing="yes", i2p_tunneled="on", fixed_mtu="1400", max_reconnect_tries="3", connect_timeout="9")
    )
    assert (read.kiss_framing, read.i2p_tunneled, read.fixed_mtu) == (True, True, 1400)
    assert (read.max_reconnect_tries, read.connect_timeout) == (3, 9.0)
    made = TcpClientInterface(read)
    assert (made.port.hw_mtu, made.port.upgradable, made.port.wants_tunnel) == (1400, True, False)
    assert made.settings.framing is KISS
    assert TcpClientInterface(TcpClientConfig.from_section(tcp())).settings.framing is HDLC


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"fixed_mtu": "485"}, "fixed_mtu: '485' is not within 500"),
        ({"target_port": "70000"}, "target_port: '70000'"),
        ({"target_host": ""}, "target_host: is set to nothing"),
        ({"kiss_framing": "perhaps"}, "kiss_framing: 'perhaps'"),
        ({"bitrate": "fast"}, "bitrate: 'fast'"),
        ({"ifac_size": "520"}, "ifac_size: 520 bits"),
    ],
)
def test_faults_name_place_option_and_limits(options: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError) as failure:
        TcpClientConfig.from_section(tcp(**options))
    assert words in str(failure.value)
    assert str(failure.value).startswith("config:")


def test_server_port_alias_wins_and_device_replaces_the_address() -> None:
    base = {"type": "TCPServerInterface"}
    read = TcpServerConfig.from_section(section({**base, "listen_ip": "::", "listen_port": "1", "port": "2"}))
    assert (read.listen_ip, read.listen_port) == ("::", 2)
    read = TcpServerConfig.from_section(section({**base, "device": "eth0", "port": "2", "prefer_ipv6": "yes"}))
    assert (read.listen_ip, read.device, read.prefer_ipv6) == (None, "eth0", True)
    for missing in ({"listen_ip": "::"}, {"listen_port": "1"}):
        with pytest.raises(ConfigError, match="is missing"):
            TcpServerConfig.from_section(section({**base, **missing}))


def test_flapping_options() -> None:
    base = {"type": "BackboneInterface", "listen_ip": "::", "port": "1"}
    rules = BackboneConfig.from_section(section(base)).flapping
    assert (rules.enabled, rules.threshold, rules.grace, rules.block_time) == (True, 20.0, 5, 43_200.0)
    more = {"fast_flapping_threshold": "3", "fast_flapping_grace": "1", "fast_flapping_block_time": "2"}
    rules = BackboneConfig.from_section(section({**base, **more, "block_fast_flapping": "no"})).flapping
    assert (rules.enabled, rules.threshold, rules.grace, rules.block_time) == (False, 3.0, 1, 120.0)


def test_types_not_built_yet_and_unknown_ones_are_told_apart() -> None:
    with pytest.raises(ConfigError, match="AutoInterface is not available in this version yet"):
        registry.lookup(section({"type": "AutoInterface"}))
    with pytest.raises(ConfigError, match="'NoSuchInterface' is not a known interface type"):
        registry.lookup(section({"type": "NoSuchInterface"}))
    with pytest.raises(ConfigError, match="type: is missing"):
        registry.lookup(section({"target_host": "x"}))


def test_all_options_of_the_built_types_are_known() -> None:
    """Nothing a stock file may contain for these types is reported as unknown."""
    for options in (
        {"type": "TCPClientInterface", "target_host": "h", "target_port": "1", "connect_timeout": "5"},
        {"type": "TCPServerInterface", "listen_ip": "::", "listen_port": "1", "i2p_tunneled": "no"},
        {"type": "BackboneInterface", "remote": "h", "target_port": "1", "i2p_tunneled": "no", "connect_timeout": "5"},
    ):
        read = section({**options, "enabled": "yes", "mode": "gw", "passphrase": "p", "ic_new_time": "7"})
        registry.parse(read)
        assert read.unknown() == []  # type: ignore[attr-defined]


@pytest.mark.parametrize("bad", ["0", "129", "many"])
def test_a_batch_out_of_bounds_is_refused(bad: str) -> None:
    assert CommonConfig.from_section(tcp(batch="1")).batch == 1
    assert CommonConfig.from_section(tcp(batch="128")).batch == 128
    with pytest.raises(ConfigError, match="batch"):
        CommonConfig.from_section(tcp(batch=bad))
