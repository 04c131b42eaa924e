"""What a section says about telling others of the interface."""

from __future__ import annotations

from pathlib import Path

import pytest

from rnsfast.errors import ConfigError
from rnsfast.interfaces import registry
from rnsfast.interfaces.common import CommonConfig
from rnsfast.interfaces.discovery import DiscoveryOptions, published
from rnsfast.node.config import parse_config
from rnsfast.node.configfile import Section
from tests.vectors_support import Case, by_name, vectors

RENAMED = {
    "discovery_announce_interval": "announce_interval", "discovery_publish_ifac": "publish_ifac",
    "reachable_on": "reachable_on", "discovery_name": "name", "discovery_encrypt": "encrypt",
    "discovery_location": "location_program", "discovery_latitude": "latitude", "discovery_longitude": "longitude",
    "discovery_height": "height", "discovery_frequency": "frequency", "discovery_bandwidth": "bandwidth",
    "discovery_modulation": "modulation", "discovery_stamp_value": "stamp_cost",
}  # fmt: skip
CASES = [case for case in vectors("node", "config", "interfaces") if "discoverable" in case["name"]]


def section(text: str) -> Section:
    return parse_config(f"[interfaces]\n[[x]]\n{text}\n".encode(), Path("config")).sections[0]


@pytest.mark.parametrize("case", CASES, ids=by_name)
def test_options_are_read_as_by_the_reference(case: Case) -> None:
    common = CommonConfig.from_section(parse_config(case["text"].encode()).sections[0])
    options, expected = common.discovery, case["interface_changed"]
    assert options is not None and common.discoverable
    for key, name in RENAMED.items():
        if key in expected:
            assert getattr(options, name) == expected[key], key
    operator = expected.get("discovery_lxmf_address")
    assert (options.operator and options.operator.hex()) == operator
    assert common.mode == expected.get("mode", 1)


def test_nothing_is_read_of_an_interface_that_is_not_discoverable() -> None:
    assert CommonConfig.from_section(section("discovery_modulation = x\nlatitude = 1000")).discovery is None


@pytest.mark.parametrize("text", ["discovery_modulation = fsk", "latitude = 91", "discovery_stamp_value = 41"])
def test_wrong_values_are_errors(text: str) -> None:
    with pytest.raises(ConfigError):
        CommonConfig.from_section(section(f"discoverable = yes\n{text}"))


def test_access_codes_are_published_only_if_there_are_any(caplog: pytest.LogCaptureFixture) -> None:
    common = CommonConfig.from_section(section("discoverable = yes\npublish_ifac = yes"))
    assert common.discovery == DiscoveryOptions() and "publish_ifac" in caplog.text
    with_codes = "discoverable = yes\npublish_ifac = yes\nnetwork_name = net\npassphrase = secret"
    options = CommonConfig.from_section(section(with_codes)).discovery
    assert options is not None and (options.network_name, options.passphrase) == ("net", "secret")
    assert "secret" not in repr(options)


@pytest.mark.parametrize(
    ("text", "kind", "port"),
    [
        ("type = TCPServerInterface\nlisten_ip = 127.0.0.1\nport = 4242", "TCPServerInterface", 4242),
        ("type = BackboneInterface\nlisten_on = 127.0.0.1\nport = 4243", "BackboneInterface", 4243),
        ("type = TCPClientInterface\ntarget_host = h\ntarget_port = 1\nkiss_framing = yes", "KISSInterface", None),
        ("type = TCPClientInterface\ntarget_host = h\ntarget_port = 1", None, None),
        ("type = BackboneInterface\nremote = h\nport = 1", None, None),
    ],
)
def test_which_interfaces_can_tell_of_themselves(text: str, kind: str | None, port: int | None) -> None:
    found = published(registry.parse(section(f"{text}\ndiscoverable = yes"))())
    assert (found and (found.kind, found.port)) == (kind and (kind, port))
    assert published(registry.parse(section(text))()) is None
