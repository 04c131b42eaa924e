"""`rnsfast tun`: an IP tunnel over a link.  docs/tun.md, Gateway mode."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_interface, ip_network
from typing import Any, Final

import click

from rnsfast.cli.common import (
    LINGER,
    RECEIVE_LOGLEVEL,
    Events,
    Stopped,
    config_directory,
    load_identity,
    no_way_out,
    parse_hash,
    set_up_logging,
    start_node,
)
from rnsfast.cli.exits import CommandError, Exit, printable
from rnsfast.cli.identity import own_identity
from rnsfast.gateway import Gateway, GatewayConfig, State, tunnel_hash
from rnsfast.gateway.device import IPV6_MTU, TunnelDevice
from rnsfast.gateway.ip import Network
from rnsfast.gateway.messages import MAX_ADDRESSES, Address
from rnsfast.osio.device import DeviceError, open_tun

OWN_IDENTITY: Final = "storage/identities/rnsfast-tun"  # below the configuration directory
CONFIG_HELP: Final = "Configuration directory; it is made if it does not exist."
IDENTITY_HELP: Final = "Identity file of this end; without it, the node's own is used."


@click.group()
def tun() -> None:
    """An encrypted IP tunnel to a peer, through a TUN device on either side."""


@tun.command("id")
@click.option("--config", metavar="DIR", help=CONFIG_HELP)
@click.option("--identity", metavar="FILE", help=IDENTITY_HELP)
def show_id(config: str | None, identity: str | None) -> None:
    """Print the address of this end, for `--peer` at the other."""
    click.echo(tunnel_hash(_identity(config, identity)).hex())


@tun.command()
@click.option("--config", metavar="DIR", help=CONFIG_HELP)
@click.option("--identity", metavar="FILE", help=IDENTITY_HELP)
@click.option("--peer", metavar="HASH", required=True, help="Address of the other end, as its `rnsfast tun id` prints.")
@click.option(
    "--address", "addresses", metavar="CIDR", multiple=True, required=True,
    help="Address of this end in the tunnel, with its network; may be repeated.",
)  # fmt: skip
@click.option(
    "--route", "routes", metavar="NET", multiple=True,
    help="A further network behind the peer: routed into the tunnel, and allowed to come out; may be repeated.",
)  # fmt: skip
@click.option("--allow", metavar="HASH", multiple=True, help="A further end that may come in; may be repeated.")
@click.option("--device", metavar="NAME", help="Name of the device; the system chooses one if not given.")
@click.option(
    "--mtu", metavar="N", type=click.IntRange(68, 65_535), help="Bytes of the largest packet, if the link carries more."
)
@click.option("--batch", metavar="N", type=click.IntRange(1, 128), help="Packets taken from the device at a time.")
@click.option("-v", "--verbose", count=True, help="Log more; may be repeated.")
def up(
    config: str | None,
    identity: str | None,
    peer: str,
    addresses: Sequence[str],
    routes: Sequence[str],
    allow: Sequence[str],
    device: str | None,
    mtu: int | None,
    batch: int | None,
    verbose: int,
) -> None:
    """Run one end of a tunnel, until a signal. Needs root or CAP_NET_ADMIN."""
    target = parse_hash(peer, "tunnel address")
    allowed = frozenset(parse_hash(text, "tunnel address") for text in allow)
    own, networks = _addresses(addresses), tuple(_network(text) for text in routes)
    if mtu is not None and mtu < IPV6_MTU and any(address.version == 6 for address in own):
        raise CommandError(f"--mtu {mtu} is too little for IPv6, which needs {IPV6_MTU}", Exit.USAGE)
    home = config_directory(config)
    set_up_logging(home, verbose, most=RECEIVE_LOGLEVEL)
    who = _identity(config, identity)
    if tunnel_hash(who) == target:
        raise CommandError(f"{peer} is the address of this end: --peer takes the other's", Exit.USAGE)
    events = Events()
    with events.listening():
        opened = _open(device, batch, own, networks, mtu)
        try:
            node = start_node(config)
        except BaseException:
            opened.close()
            raise
        try:
            gateway = Gateway(
                node,
                opened.io,
                opened,
                GatewayConfig(identity=who, peer=target, addresses=own, routes=networks, allow=allowed, mtu=mtu),
                on_change=lambda state, sentence: events.put((state, sentence)),
            )
            click.echo(f"{tunnel_hash(who).hex()} on {opened.name}: {', '.join(map(str, own))}")
            if not node.interfaces and (problem := no_way_out(node, home)) is not None:
                click.echo(f"rnsfast: {printable(problem)}; waiting for one", err=True)
            with gateway:
                try:
                    _serve(gateway, events)
                finally:
                    click.echo(_summary(gateway.status()))
        finally:
            node.stop(linger=LINGER)
            opened.close()


def _identity(config: str | None, identity: str | None) -> Any:
    if identity is not None:
        return load_identity(identity)
    return own_identity(config_directory(config) / OWN_IDENTITY)


def _addresses(texts: Sequence[str]) -> tuple[Address, ...]:
    found: list[Address] = []
    for text in texts:
        try:
            address = ip_interface(text)
        except ValueError as error:
            raise CommandError(
                f"--address {text}: this is no IP address with its network, as in 10.77.0.1/24", Exit.USAGE
            ) from error
        if "/" not in text:
            raise CommandError(f"--address {text}: the network is missing, as in {text}/24", Exit.USAGE)
        if address.ip.is_unspecified or address.ip.is_multicast or address.ip.is_loopback:
            raise CommandError(f"--address {text}: no device can have this address", Exit.USAGE)
        if address.version == 4 and address.network.prefixlen < 31:
            meaning = {address.network[0]: "the network itself", address.network[-1]: "everybody in the network"}
            if address.ip in meaning:
                raise CommandError(f"--address {text}: that means {meaning[address.ip]}; take another", Exit.USAGE)
        if any(address.ip == other.ip for other in found):
            raise CommandError(f"--address {text} is given twice", Exit.USAGE)
        found.append(address)
    if len(found) > MAX_ADDRESSES:
        raise CommandError(f"--address is given {len(found)} times; a tunnel has at most {MAX_ADDRESSES}", Exit.USAGE)
    return tuple(found)


def _network(text: str) -> Network:
    try:
        network = ip_network(text, strict=False)
    except ValueError as error:
        raise CommandError(f"--route {text}: this is no network, as in 10.88.0.0/16", Exit.USAGE) from error
    if network.network_address != ip_interface(text).ip:
        raise CommandError(f"--route {text}: the network is called {network}", Exit.USAGE)
    return network


def _open(
    name: str | None, batch: int | None, addresses: Sequence[Address], routes: Sequence[Network], mtu: int | None
) -> TunnelDevice:
    try:
        return TunnelDevice(open_tun(name, batch=batch), addresses, routes, mtu)
    except DeviceError as error:
        raise CommandError(str(error), Exit.DEVICE) from error


def _serve(gateway: Gateway, events: Events) -> None:
    """A line for each change, until a signal or the end of what the tunnel needs."""
    said: set[tuple[State, str]] = set()  # attempts that repeat themselves are said once an outage
    while True:
        event = events.get()
        if isinstance(event, Stopped):
            return
        state, sentence = event
        if state is State.FAILED:
            raise CommandError(sentence, Exit.DEVICE if gateway.is_device_gone else Exit.USAGE)
        if event not in said:
            click.echo(printable(f"{state.value}: {sentence}"))
        said.add(event)
        if state is State.UP:
            said = {event}


def _summary(status: dict[str, Any]) -> str:
    counters, drops = status["counters"], status["drops"]
    lost = ", ".join(f"{name} {count:,}" for name, count in sorted(drops.items())) or "nothing"
    return (
        f"sent {counters['out.packets']:,} packets, {counters['out.bytes']:,} bytes; "
        f"received {counters['in.packets']:,} packets, {counters['in.bytes']:,} bytes; dropped: {lost}"
    )
