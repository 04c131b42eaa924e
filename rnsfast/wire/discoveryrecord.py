"""Records of discovered interfaces, one file each, as the reference keeps them.  Protocol 02, section 15.4.

The configuration text in a record is made from the rest; what a file says there is not read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from rnsfast.crypto.stamp import STAMP_SIZE
from rnsfast.wire.discovery import (
    BACKBONE,
    I2P,
    KISS,
    RNODE,
    TCP_SERVER,
    WEAVE,
    Offer,
    build_info,
    discovery_hash,
    parse_info,
    shown_name,
)
from rnsfast.wire.drop import Drop
from rnsfast.wire.storedmsgpack import pack, unpack

#: Field of the offer and key in the record, by type, in the order of the file.
TYPE_FIELDS: Final[dict[str, tuple[tuple[str, str], ...]]] = {
    BACKBONE: (("reachable_on", "reachable_on"), ("port", "port")),
    TCP_SERVER: (("reachable_on", "reachable_on"), ("port", "port")),
    I2P: (("reachable_on", "reachable_on"),),
    RNODE: (
        ("frequency", "frequency"),
        ("bandwidth", "bandwidth"),
        ("spreading_factor", "sf"),
        ("coding_rate", "cr"),
    ),
    WEAVE: (
        ("frequency", "frequency"),
        ("bandwidth", "bandwidth"),
        ("channel", "channel"),
        ("modulation", "modulation"),
    ),
    KISS: (("frequency", "frequency"), ("bandwidth", "bandwidth"), ("modulation", "modulation")),
}

_NEEDS_QUOTES: Final = frozenset("#'\"[],=%")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One discovered interface, and how it came to be known. Times are unix seconds."""

    offer: Offer
    stamp: bytes  # 32 bytes
    value: int  # bits of work in the stamp
    network_id: bytes  # 16 bytes, identity hash of the announcer
    hops: int
    received: float  # when the announce came that made it what it is
    discovered: float
    last_heard: float
    heard_count: int = 0  # times it was heard again

    @property
    def hash(self) -> bytes:
        """What it is kept under, 32 bytes."""
        return discovery_hash(self.offer)

    @property
    def name(self) -> str:
        """What to show."""
        return shown_name(self.offer)


def build_record(record: Record) -> bytes:
    """The content of a record's file."""
    return pack(as_map(record))


def as_map(record: Record) -> dict[str, Any]:
    """The record as the map that is stored, and that programs know."""
    offer = record.offer
    found: dict[str, Any] = {
        "type": offer.kind,
        "impl_name": offer.implementation,
        "version": offer.version,
        "transport": offer.transport,
        "name": record.name,
        "received": record.received,
        "stamp": record.stamp,
        "value": record.value,
        "transport_id": offer.transport_id.hex(),
        "network_id": record.network_id.hex(),
        "hops": record.hops,
        "latitude": offer.latitude,
        "longitude": offer.longitude,
        "height": offer.height,
    }
    if offer.network_name is not None:
        found["ifac_netname"] = offer.network_name
    if offer.passphrase is not None:
        found["ifac_netkey"] = offer.passphrase
    for field, key in TYPE_FIELDS.get(offer.kind, ()):
        found[key] = getattr(offer, field)
    found["config_entry"] = config_entry(offer)
    found["discovery_hash"] = record.hash
    if offer.operator is not None:
        found["operator_lxmf_address"] = offer.operator
    found["discovered"] = record.discovered
    found["last_heard"] = record.last_heard
    found["heard_count"] = record.heard_count
    return found


def parse_record(data: bytes) -> Record | None:
    """Read a record's file; None if it says something that no announce could have said."""
    found = unpack(data)
    if not isinstance(found, dict):
        return None
    try:
        offer = Offer(
            kind=found["type"],
            transport=found["transport"],
            transport_id=bytes.fromhex(found["transport_id"]),
            name=found["name"],
            implementation=found.get("impl_name"),
            version=found.get("version"),
            latitude=found["latitude"],
            longitude=found["longitude"],
            height=found["height"],
            network_name=found.get("ifac_netname"),
            passphrase=found.get("ifac_netkey"),
            operator=found.get("operator_lxmf_address"),
            **{field: found.get(key) for field, key in TYPE_FIELDS[found["type"]]},
        )
        checked = parse_info(build_info(offer))
        stamp, value, hops, count = found["stamp"], found["value"], found["hops"], found["heard_count"]
        network_id = bytes.fromhex(found["network_id"])
        times = [float(found[key]) for key in ("received", "discovered", "last_heard")]
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    whole = (value, hops, count)
    if isinstance(checked, Drop) or not all(isinstance(n, int) and n >= 0 for n in whole) or len(network_id) != 16:
        return None
    if not isinstance(stamp, bytes) or len(stamp) != STAMP_SIZE:
        return None
    return Record(
        offer=checked,
        stamp=stamp,
        value=value,
        network_id=network_id,
        hops=hops,
        received=times[0],
        discovered=times[1],
        last_heard=times[2],
        heard_count=count,
    )


def config_entry(offer: Offer) -> str:
    """The section of a configuration that connects to what is offered; empty for a type that has none."""
    lines = {
        BACKBONE: _reached,
        TCP_SERVER: _reached,
        I2P: _i2p,
        RNODE: _rnode,
        WEAVE: _weave,
        KISS: _kiss,
    }.get(offer.kind)
    if lines is None:
        return ""
    kind = BACKBONE if offer.kind == TCP_SERVER else offer.kind
    written = [f"type = {kind}", "enabled = yes", *lines(offer)]
    if offer.kind != RNODE:
        written.append(f"transport_identity = {offer.transport_id.hex()}")
    if offer.network_name is not None:
        written.append(f"network_name = {_quoted(offer.network_name)}")
    if offer.passphrase is not None:
        written.append(f"passphrase = {_quoted(offer.passphrase)}")
    return "\n  ".join([f"[[{_quoted(shown_name(offer))}]]", *written])


def _quoted(text: str) -> str:
    """As it must be written to be read back. A text with both kinds of quotes cannot be; it stays as it is."""
    if not _NEEDS_QUOTES.intersection(text) and text == text.strip():
        return text
    return f"'{text}'" if '"' in text else f'"{text}"'


def _reached(offer: Offer) -> list[str]:
    return [f"remote = {offer.reachable_on}", f"target_port = {offer.port}"]


def _i2p(offer: Offer) -> list[str]:
    return [f"peers = {offer.reachable_on}.b32.i2p"]


def _rnode(offer: Offer) -> list[str]:
    return [
        "port = ",
        f"frequency = {offer.frequency}",
        f"bandwidth = {offer.bandwidth}",
        f"spreadingfactor = {offer.spreading_factor}",
        f"codingrate = {offer.coding_rate}",
        "txpower = ",
    ]


def _weave(offer: Offer) -> list[str]:
    return ["port = "]


def _kiss(offer: Offer) -> list[str]:
    return [
        "port = ",
        f"# Frequency: {offer.frequency}",
        f"# Bandwidth: {offer.bandwidth}",
        f"# Modulation: {offer.modulation}",
    ]
