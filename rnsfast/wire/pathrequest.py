"""The data of path request packets.  Protocol 02, section 7.1.

size  field
16    destination    whose path is asked for
16    transport id   of the asking node, if it is a transport node
rest  tag            1..16 bytes without transport id, any number with one; senders use 16
"""

from __future__ import annotations

from typing import Final

from rnsfast.wire.drop import Drop
from rnsfast.wire.names import destination_hash, name_hash
from rnsfast.wire.value import value

#: The PLAIN destination that path requests are sent to.
PATH_REQUEST_DESTINATION: Final = destination_hash(name_hash("rnstransport", "path", "request"), None)
TAG_SIZE: Final = 16  # bytes, of the tags we make


@value
class PathRequest:
    """Who looks for what. Requests with the same destination and tag are the same request."""

    destination: bytes  # 16 bytes
    transport_id: bytes | None  # 16 bytes
    tag: bytes  # at least 1 byte


def parse_path_request(data: bytes) -> PathRequest | Drop:
    """Read the data of a path request. One without a tag cannot be told from others and is dropped."""
    size = len(data)
    if size > 32:
        return PathRequest(data[:16], data[16:32], data[32:])
    if size > 16:
        return PathRequest(data[:16], None, data[16:])
    return Drop.PATH_REQUEST_SIZE


def build_path_request(request: PathRequest) -> bytes:
    """The data of a path request. ValueError if it would not read back as the same."""
    via = request.transport_id or b""
    if len(request.destination) != 16 or len(via) not in (0, 16):
        raise ValueError(f"addresses have 16 bytes, not {len(request.destination)} and {len(via)}")
    if not request.tag or (not via and len(request.tag) > 16):
        raise ValueError(f"a tag of {len(request.tag)} bytes: 1 to 16, or more behind a transport id")
    return request.destination + via + request.tag
