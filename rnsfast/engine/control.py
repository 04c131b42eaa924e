"""What packets of a link do, by context: everything sealed that is neither channel nor proof.  Protocol 03.

Packets for the application come in batches; each other function takes one authentic packet: the raw bytes, and its
plaintext.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from rnsfast.crypto.hashes import full
from rnsfast.crypto.identity import Identity
from rnsfast.engine.linkstate import Cause
from rnsfast.engine.requests import receive_request, receive_response, refuse_resource
from rnsfast.wire.drop import Drop
from rnsfast.wire.handshake import identify_signed_data, parse_identify, parse_rtt
from rnsfast.wire.packet import (
    CTX_LINKCLOSE,
    CTX_LINKIDENTIFY,
    CTX_LRRTT,
    CTX_REQUEST,
    CTX_RESOURCE_ADV,
    CTX_RESPONSE,
)
from rnsfast.wire.requests import unpack

if TYPE_CHECKING:
    from rnsfast.engine.link import Link


def receive_data(link: Link, packets: list[bytes], now: float) -> None:
    """Packets for the application: duplicates out, one opening for all of them, one delivery."""
    remember, drops = link.engine.seen.add, link.port.drops
    tokens: list[bytes] = []
    hashes: list[bytes] = []
    for raw in packets:
        digest = full(bytes((raw[0] & 0x0F,)) + raw[2:])
        if remember(digest):
            tokens.append(raw[19:])
            hashes.append(digest)
    if len(tokens) < len(packets):
        drops[Drop.FILTERED] += len(packets) - len(tokens)
    opened = link.key.open_many(tokens)
    plains = [plain for plain in opened if plain is not None]
    if len(plains) < len(opened):
        drops[Drop.LINK_TOKEN] += len(opened) - len(plains)
        hashes = [digest for digest, plain in zip(hashes, opened, strict=True) if plain is not None]
    if plains:
        link.heard(now, data=True)
        link.engine.link_data(link, plains, hashes)


def receive_rtt(link: Link, raw: bytes, plain: bytes, now: float) -> None:
    """Responder: the initiator's measurement, which activates the link. Once.  Protocol 03, section 7."""
    if link.initiator or link.rtt_told:
        link.port.drops[Drop.LINK_UNEXPECTED] += 1
        return
    rtt = parse_rtt(plain)
    if isinstance(rtt, Drop):
        link.port.drops[rtt] += 1
        link.close(now, "the peer's round trip time packet was unreadable")
        return
    link.take_rtt(rtt, now)


def receive_close(link: Link, raw: bytes, plain: bytes, now: float) -> None:
    """The peer closes: its own link id says so, anything else does not.  Protocol 03, section 13.3."""
    if plain == link.link_id:
        link.apply(Cause.CLOSE_REMOTE, now)
    else:
        link.port.drops[Drop.LINK_UNEXPECTED] += 1


def receive_identity(link: Link, raw: bytes, plain: bytes, now: float) -> None:
    """Responder: the initiator says who it is. The first valid one counts.  Protocol 03, section 14."""
    claim = parse_identify(plain)
    if isinstance(claim, Drop):
        link.port.drops[claim] += 1
        return
    identity = Identity.from_public(claim.public_key)
    if link.initiator or link.remote_identity is not None:
        link.port.drops[Drop.LINK_UNEXPECTED] += 1
    elif not identity.verify(claim.signature, identify_signed_data(link.link_id, claim.public_key)):
        link.port.drops[Drop.LINK_IDENTIFY] += 1
    else:
        link.heard(now, data=True)
        link.remote_identity = identity
        link.engine.peer_identified(link)


def receive_resource_advertisement(link: Link, raw: bytes, plain: bytes, now: float) -> None:
    """No resources are accepted; one that is no advertisement at all breaks the protocol (protocol 03, 11)."""
    link.heard(now, data=True)
    advertisement = unpack(plain)
    if not isinstance(advertisement, dict):
        link.close(now, "the peer's resource advertisement was unreadable")
    else:
        refuse_resource(link, advertisement, now)


#: By context. What is not here has no user and is counted.
HANDLERS: Final[dict[int, Callable[[Link, bytes, bytes, float], None]]] = {
    CTX_LRRTT: receive_rtt,
    CTX_LINKCLOSE: receive_close,
    CTX_LINKIDENTIFY: receive_identity,
    CTX_RESOURCE_ADV: receive_resource_advertisement,
    CTX_REQUEST: receive_request,
    CTX_RESPONSE: receive_response,
}
