"""Requests and responses on links.  Protocol 03, section 15.

request   msgpack [timestamp float64, path hash bin 16, data]
response  msgpack [request id bin 16, value]

The id of a request that fits one packet is the first half of that packet's hash; the id of a larger one, which travels
as a resource, is that of its packed bytes.
"""

from __future__ import annotations

from typing import Any, Final

import msgpack

from rnsfast.crypto.hashes import truncated
from rnsfast.wire.drop import Drop
from rnsfast.wire.value import value

ID_SIZE: Final = 16  # bytes of a request id and of a path hash
FLAG_REQUEST: Final = 0x08  # in the flags of a resource advertisement: it carries a packed request
FLAG_RESPONSE: Final = 0x10  # a packed response
FLAG_METADATA: Final = 0x20  # content begins with packed metadata, its size before it in 3 bytes

_UNREADABLE: Final = (ValueError, TypeError, OverflowError, msgpack.UnpackException)


@value
class Request:
    """What was asked. `requested_at` is the asker's clock, unchecked."""

    requested_at: float  # unix time
    path_hash: bytes  # 16 bytes
    data: Any


@value
class Response:
    """What was answered."""

    request_id: bytes  # 16 bytes
    value: Any


def path_hash(path: str) -> bytes:
    """The 16 bytes that stand for a path."""
    return truncated(path.encode())


def build_request(requested_at: float, path: bytes, data: Any) -> bytes:
    """Pack a request to the path of hash `path`. TypeError for data that msgpack cannot express."""
    return bytes(msgpack.packb([float(requested_at), path, data]))


def parse_request(plain: bytes) -> Request | Drop:
    """Read a packed request."""
    found = unpack(plain)
    if not isinstance(found, list) or len(found) < 3:
        return Drop.REQUEST_UNREADABLE
    at, path, data = found[:3]
    if not isinstance(at, int | float) or not isinstance(path, bytes) or len(path) != ID_SIZE:
        return Drop.REQUEST_UNREADABLE
    return Request(float(at), path, data)


def build_response(request_id: bytes, response: Any) -> bytes:
    """Pack a response. TypeError for a value that msgpack cannot express."""
    return bytes(msgpack.packb([request_id, response]))


def parse_response(plain: bytes) -> Response | Drop:
    """Read a packed response."""
    found = unpack(plain)
    if not isinstance(found, list) or len(found) < 2:
        return Drop.RESPONSE_UNREADABLE
    request_id, response = found[:2]
    if not isinstance(request_id, bytes) or len(request_id) != ID_SIZE:
        return Drop.RESPONSE_UNREADABLE
    return Response(request_id, response)


def resource_request_id(packed: bytes) -> bytes:
    """The id of a request too large for one packet."""
    return truncated(packed)


def response_size(response: Any) -> int:
    """The size the API reports: two bytes less than packed, exact for byte strings below 256 bytes only (trap T11)."""
    return len(msgpack.packb(response)) - 2


def unpack(plain: bytes) -> Any:
    """The first msgpack object in `plain`, None if there is none; bytes behind it are ignored (trap T17)."""
    try:
        return msgpack.unpackb(plain, strict_map_key=False)
    except msgpack.ExtraData as extra:
        return extra.unpacked
    except _UNREADABLE:
        return None
