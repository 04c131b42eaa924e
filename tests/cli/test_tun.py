"""What `rnsfast tun` says when it cannot do what was asked, and the address it prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from rnsfast import Identity
from rnsfast.cli.exits import Exit
from rnsfast.cli.main import main
from rnsfast.cli.tun import _addresses
from rnsfast.gateway import tunnel_hash
from rnsfast.osio.device import DeviceError
from tests.cli.support import write_config
from tests.cli.test_sentences import complaint

PEER = "00" * 16
ADDRESS = "10.177.0.1/24"


def call(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["tun", *map(str, arguments)])


@pytest.fixture
def config(tmp_path: Path) -> str:
    return write_config(tmp_path / "node")


class Refusing:
    """A device of which one step fails."""

    name = "tun7"

    def __init__(self, step: str, sentence: str) -> None:
        self.closed = False
        self._step, self._sentence = step, sentence

    def __getattr__(self, step: str) -> Any:
        def do(*arguments: object) -> None:
            if step == self._step:
                raise DeviceError(f"{self.name}: {self._sentence}")

        return do

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("command", [[], ["id"], ["up"]])
def test_every_command_has_help(command: list[str]) -> None:
    result = call(*command, "-h")
    assert result.exit_code == 0 and "Usage:" in result.stdout


def test_the_address_is_made_once_and_stays(config: str) -> None:
    first, second = call("id", "--config", config), call("id", "--config", config)
    assert first.exit_code == 0 and first.stdout == second.stdout
    identity = Identity.load(Path(config) / "storage/identities/rnsfast-tun")
    assert first.stdout == tunnel_hash(identity).hex() + "\n"


def test_the_address_of_an_identity_file(tmp_path: Path) -> None:
    identity = Identity()
    identity.save(tmp_path / "me")
    assert call("id", "--identity", tmp_path / "me").stdout == tunnel_hash(identity).hex() + "\n"
    assert "does not exist" in complaint(call("id", "--identity", tmp_path / "none"), Exit.FILE)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--peer", "0011", "--address", ADDRESS], "'0011' is no tunnel address: it has 4 hexadecimal digits"),
        (["--peer", "x" * 32, "--address", ADDRESS], f"'{'x' * 32}' is no tunnel address"),
        (["--peer", PEER, "--address", "10.177.0.1"], "--address 10.177.0.1: the network is missing, as in"),
        (["--peer", PEER, "--address", "10.177.0/24"], "--address 10.177.0/24: this is no IP address with"),
        (["--peer", PEER, "--address", "10.177.0.1/33"], "--address 10.177.0.1/33: this is no IP address with"),
        (["--peer", PEER, "--address", "10.177.0.0/24"], "--address 10.177.0.0/24: that means the network itself"),
        (["--peer", PEER, "--address", "10.177.0.255/24"], "--address 10.177.0.255/24: that means everybody in the"),
        (["--peer", PEER, "--address", "224.0.0.1/24"], "--address 224.0.0.1/24: no device can have this address"),
        (["--peer", PEER, "--address", ADDRESS, "--address", ADDRESS], f"--address {ADDRESS} is given twice"),
        (["--peer", PEER, "--address", ADDRESS, "--route", "10.1.1.1/8"], "the network is called 10.0.0.0/8"),
        (["--peer", PEER, "--address", ADDRESS, "--route", "home"], "--route home: this is no network, as in"),
        (["--peer", PEER, "--address", ADDRESS, "--allow", "zz"], "'zz' is no tunnel address"),
        (
            ["--peer", PEER, "--address", "fd77::1/64", "--mtu", "1000"],
            "--mtu 1000 is too little for IPv6, which needs",
        ),
    ],
)
def test_wrong_arguments_are_told_before_anything_is_opened(
    config: str, arguments: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rnsfast.cli.tun.open_tun", lambda *a, **k: pytest.fail("opened"))
    assert sentence in complaint(call("up", "--config", config, *arguments), Exit.USAGE)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--address", ADDRESS], "Missing option '--peer' (see `rnsfast tun up -h`)"),
        (["--peer", PEER], "Missing option '--address' (see `rnsfast tun up -h`)"),
        (["--peer", PEER, "--address", ADDRESS, "--batch", "0"], "Invalid value for '--batch': 0 is not in the range"),
        (["--peer", PEER, "--adress", ADDRESS], "No such option"),
        (["--peer", PEER, "--address", ADDRESS, "more"], "Got unexpected extra argument (more) (see `rnsfast tun up"),
    ],
)
def test_what_is_missing_or_out_of_range(arguments: list[str], sentence: str) -> None:
    result = CliRunner().invoke(main, ["tun", "up", *arguments], prog_name="rnsfast")
    assert complaint(result, Exit.USAGE).startswith(sentence)


@pytest.mark.parametrize("mask", ["10.177.0.0/31", "10.177.0.1/31", "10.177.0.5/32", "fd77::/64"])
def test_addresses_that_only_look_like_a_network(mask: str) -> None:
    (address,) = _addresses([mask])
    assert str(address) == mask


def test_the_peer_is_not_this_end(config: str) -> None:
    own = call("id", "--config", config).stdout.strip()
    result = call("up", "--config", config, "--peer", own, "--address", ADDRESS)
    assert complaint(result, Exit.USAGE) == f"{own} is the address of this end: --peer takes the other's"


def test_a_device_that_cannot_be_opened(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str | None, *, batch: int | None) -> None:
        assert (name, batch) == ("tun7", 16)
        raise DeviceError("no permission to open tun7: TUN devices need root or CAP_NET_ADMIN")

    monkeypatch.setattr("rnsfast.cli.tun.open_tun", refuse)
    result = call("up", "--config", config, "--peer", PEER, "--address", ADDRESS, "--device", "tun7", "--batch", 16)
    assert complaint(result, Exit.DEVICE) == "no permission to open tun7: TUN devices need root or CAP_NET_ADMIN"


@pytest.mark.parametrize(
    ("step", "sentence"),
    [
        ("add_address", "10.177.0.1 is already used by another device of this machine"),
        ("up", "cannot be brought up"),
        ("add_route", "the route to 10.8.0.0/16 cannot be added"),
        ("set_mtu", "the MTU cannot be set"),
    ],
)
def test_a_device_that_cannot_be_set_up_is_closed(
    config: str, step: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Refusing(step, sentence)
    monkeypatch.setattr("rnsfast.cli.tun.open_tun", lambda *a, **k: device)
    common = "--config", config, "--peer", PEER, "--address", ADDRESS
    result = call("up", *common, "--route", "10.8.0.0/16", "--mtu", 1300)
    assert complaint(result, Exit.DEVICE) == f"tun7: {sentence}" and device.closed


def test_a_system_without_devices(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rnsfast.osio.device.sys.platform", "sunos5")
    result = call("up", "--config", config, "--peer", PEER, "--address", ADDRESS)
    assert "not available on this system" in complaint(result, Exit.DEVICE)


def test_a_node_that_cannot_start_leaves_no_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Refusing("", "")
    monkeypatch.setattr("rnsfast.cli.tun.open_tun", lambda *a, **k: device)
    config = write_config(tmp_path / "node")
    (tmp_path / "node" / "config").write_text("[reticulum\n")
    assert complaint(call("up", "--config", config, "--peer", PEER, "--address", ADDRESS), Exit.NODE)
    assert device.closed
