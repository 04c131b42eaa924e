"""Interface discovery: what a node tells about an interface that others may connect to.  Protocol 02, section 15.

app data   flags 1 | payload             flags: 0x01 signed (reserved), 0x02 encrypted to the network identity
payload    packed | stamp 32             encrypted as a whole, if it is
packed     msgpack map with integer keys
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import ip_address
from math import isfinite
from typing import Any, Final

import msgpack

from rnsfast.crypto.hashes import full
from rnsfast.crypto.stamp import STAMP_SIZE
from rnsfast.wire.drop import Drop

SIGNED: Final = 0x01  # reserved
ENCRYPTED: Final = 0x02
MIN_APP_DATA: Final = 34  # bytes: flags, stamp, and something
DEFAULT_COST: Final = 16  # bits of work that listeners ask for

BACKBONE: Final = "BackboneInterface"
TCP_SERVER: Final = "TCPServerInterface"
TCP_CLIENT: Final = "TCPClientInterface"
RNODE: Final = "RNodeInterface"
WEAVE: Final = "WeaveInterface"
I2P: Final = "I2PInterface"
KISS: Final = "KISSInterface"

MAX_TEXT: Final = 128  # characters of any text; announces have no room for more anyway
MAX_NUMBER: Final = 1 << 48  # of frequencies and the like

_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_LABEL: Final = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """An interface that others may connect to. What does not belong to its type is None."""

    kind: str  # the interface type
    transport: bool  # whether the node forwards for others
    transport_id: bytes  # 16 bytes, hash of the node's transport identity
    name: str | None = None
    implementation: str | None = None
    version: str | None = None
    latitude: float | None = None  # degrees
    longitude: float | None = None  # degrees
    height: float | None = None  # metres
    reachable_on: str | None = None  # address or host name; of I2P, the base32 name without its suffix
    port: int | None = None  # 1..65535
    network_name: str | None = None  # of access codes
    passphrase: str | None = None
    frequency: int | None = None  # Hz
    bandwidth: int | None = None  # Hz
    spreading_factor: int | None = None
    coding_rate: int | None = None
    modulation: str | int | None = None
    channel: int | None = None
    operator: bytes | None = None  # 16 bytes, an LXMF address


#: Key in the map and field, in the order in which maps are written.
FIELDS: Final[dict[str, int]] = {
    "kind": 0x00,
    "transport": 0x01,
    "transport_id": 0xFE,
    "implementation": 0xFD,
    "version": 0xFC,
    "name": 0xFF,
    "latitude": 0x03,
    "longitude": 0x04,
    "height": 0x05,
    "operator": 0xF0,
    "reachable_on": 0x02,
    "port": 0x06,
    "network_name": 0x07,
    "passphrase": 0x08,
    "frequency": 0x09,
    "bandwidth": 0x0A,
    "spreading_factor": 0x0B,
    "coding_rate": 0x0C,
    "modulation": 0x0D,
    "channel": 0x0E,
}
_ALWAYS: Final = ("kind", "transport", "transport_id", "name", "latitude", "longitude", "height")

#: What else an offer of that type must have.
REQUIRED: Final[dict[str, tuple[str, ...]]] = {
    BACKBONE: ("reachable_on", "port"),
    TCP_SERVER: ("reachable_on", "port"),
    TCP_CLIENT: (),
    I2P: ("reachable_on",),
    RNODE: ("frequency", "bandwidth", "spreading_factor", "coding_rate"),
    WEAVE: ("frequency", "bandwidth", "modulation", "channel"),
    KISS: ("frequency", "bandwidth", "modulation"),
}


def build_info(offer: Offer) -> bytes:
    """The packed map. ValueError if it says something that `parse_info` would not take."""
    packed: bytes = msgpack.packb(
        {
            key: value
            for field, key in FIELDS.items()
            if (value := getattr(offer, field)) is not None or field in _ALWAYS
        }
    )
    if isinstance(parse_info(packed), Drop):
        raise ValueError(f"{offer!r} is not complete, or has values that no listener takes")
    return packed


def parse_info(packed: bytes) -> Offer | Drop:
    """Read the packed map. The name comes back as it should be shown: see `clean_name`."""
    try:
        found = msgpack.unpackb(packed, strict_map_key=False, object_pairs_hook=_unambiguous)
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException):
        return Drop.DISCOVERY_UNREADABLE
    if not isinstance(found, dict):
        return Drop.DISCOVERY_UNREADABLE
    kind = found.get(FIELDS["kind"])
    if not isinstance(kind, str) or kind not in REQUIRED:
        return Drop.DISCOVERY_TYPE
    if any(FIELDS[field] not in found for field in (*_ALWAYS, *REQUIRED[kind])):
        return Drop.DISCOVERY_INCOMPLETE
    values: dict[str, Any] = {field: found.get(key) for field, key in FIELDS.items()}
    if any(values[field] is None for field in REQUIRED[kind]) or not all(map(_fits, values, values.values())):
        return Drop.DISCOVERY_FIELD
    values["name"] = clean_name(values["name"])
    return Offer(**values)


def _unambiguous(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    return found


def _fits(field: str, value: Any) -> bool:
    """The rule of one field. Whole numbers are no floats here, and 1 is not true."""
    if field == "transport":
        return isinstance(value, bool)
    if field == "transport_id":
        return isinstance(value, bytes) and len(value) == 16
    if value is None:
        return True
    if field in ("latitude", "longitude", "height"):
        return isinstance(value, float) and isfinite(value)
    if field == "operator":
        return isinstance(value, bytes) and len(value) == 16
    if field == "name":
        return isinstance(value, str)
    if field == "reachable_on":
        return isinstance(value, str) and (is_ip_address(value) or is_host_name(value))
    if field == "port":
        return _is_number(value, 1, 65535)
    if field in ("kind", "implementation", "version", "network_name", "passphrase"):
        return _is_text(value)
    if field == "modulation":
        return _is_text(value) or _is_number(value, 0, MAX_NUMBER)
    return _is_number(value, 0, MAX_NUMBER)


def _is_number(value: Any, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_text(value: Any) -> bool:
    """What may stand on a line of a configuration."""
    return isinstance(value, str) and len(value) <= MAX_TEXT and _CONTROL.search(value) is None


# -- app data ----------------------------------------------------------------------------------------------------------


def info_hash(packed: bytes) -> bytes:
    """What the stamp is for, 32 bytes."""
    return full(packed)


def split_payload(payload: bytes) -> tuple[bytes, bytes]:
    """Packed map and stamp of a payload in the clear."""
    return payload[:-STAMP_SIZE], payload[-STAMP_SIZE:]


def payload_hash(app_data: bytes) -> bytes:
    """By which listeners remember what they have looked at, 32 bytes."""
    return full(app_data[1:])


# -- names -------------------------------------------------------------------------------------------------------------


def clean_name(name: str | None) -> str | None:
    """A name as it may be shown and written into a configuration; None if nothing is left of it.

    ASCII without control characters, trimmed, runs of blanks reduced to one, beginning with a letter or digit and
    ending with one or a closing bracket.
    """
    if name is None:
        return None
    text = name.encode("ascii", "ignore").decode()
    text = re.sub(r"[\x00-\x1f\x7f]", "", re.sub(r"[\t\n\v\f\r ]+", " ", text))
    text = re.sub(r" +", " ", text)
    text = re.sub(r"^[^0-9A-Za-z]+", "", text)
    text = re.sub(r"[^0-9A-Za-z)]+$", "", text)
    return text[:MAX_TEXT] or None


def is_ip_address(text: str) -> bool:
    """An IPv4 or IPv6 address, without brackets and zone."""
    try:
        ip_address(text)
    except ValueError:
        return False
    return "%" not in text


def is_host_name(text: str) -> bool:
    """A host name: labels of letters, digits and inner hyphens, the last not a number; a final dot is fine."""
    labels = text.removesuffix(".").split(".")
    return len(text) <= 253 and all(_LABEL.match(label) for label in labels) and not labels[-1].isdigit()


def discovery_hash(offer: Offer) -> bytes:
    """What records are named by, 32 bytes: an offer of the same node and name replaces the one before."""
    return full((offer.transport_id.hex() + shown_name(offer)).encode())


def endpoint_hash(host: str, port: int | None) -> bytes:
    """What a connection leads to, 32 bytes."""
    return full(f"{host}:{port}".encode())


def shown_name(offer: Offer) -> str:
    """Its name, or one made from the type."""
    return offer.name or f"Discovered {offer.kind}"
