"""Why bytes from the network went no further: one member for each reason, whatever the layer that found it."""

from __future__ import annotations

from enum import Enum


class Drop(Enum):
    """Why bytes from the network went no further. The value is the counter's name in `status`."""

    # Enum.__hash__ is written in Python and takes three times as long; members are singletons, so identity will do.
    __hash__ = object.__hash__

    # Packets (protocol 01, 4.4)
    TOO_SHORT = "malformed.short"
    TOO_MANY_HOPS = "malformed.hops"
    NO_DATA = "malformed.empty"
    # Payload formats
    ANNOUNCE_SIZE = "malformed.announce"
    PATH_REQUEST_SIZE = "malformed.path_request"
    TUNNEL_SIZE = "malformed.tunnel"
    LINK_REQUEST_SIZE = "malformed.link_request"
    LINK_PROOF_SIZE = "malformed.link_proof"
    RTT_UNREADABLE = "malformed.rtt"
    IDENTIFY_SIZE = "malformed.identify"
    PROOF_SIZE = "malformed.proof"
    ENVELOPE_SIZE = "malformed.envelope"
    STREAM_SIZE = "malformed.stream"
    STREAM_COMPRESSION = "malformed.stream_compression"
    # Interface access codes (protocol 01, 10.3)
    IFAC_MISSING = "ifac.missing"
    IFAC_UNEXPECTED = "ifac.unexpected"
    IFAC_SHORT = "ifac.short"
    IFAC_INVALID = "ifac.invalid"
    # Framing (protocol 01, 11)
    FRAME_SHORT = "frame.short"
    FRAME_LONG = "frame.long"
    FRAME_UNFINISHED = "frame.unfinished"
    # Engine: filter, announces, paths (protocol 02, 3.3 and 2.3)
    FILTERED = "filter.duplicate"
    FOREIGN_TRANSPORT = "filter.foreign_transport"
    BROADCAST_TOO_FAR = "filter.broadcast_too_far"
    BROADCAST_ANNOUNCE = "filter.broadcast_announce"
    PACKET_TOO_LONG = "violation.packet_long"
    ANNOUNCE_TYPE = "violation.announce_type"
    ANNOUNCE_TOO_LONG = "violation.announce_long"
    ANNOUNCE_SIGNATURE = "violation.announce_signature"
    ANNOUNCE_DESTINATION = "violation.announce_destination"
    ANNOUNCE_KEY_CHANGED = "violation.announce_key_changed"
    ANNOUNCE_STALE = "announce.not_newer"
    PATH_REQUEST_REPEATED = "path_request.repeated"
    NO_SUCH_DESTINATION = "no_such_destination"
    DECRYPTION = "undecryptable"
    PROOF_UNEXPECTED = "proof.unexpected"
    PROOF_SIGNATURE = "proof.signature"
    NOT_FORWARDED = "not_forwarded"
    # Links (protocol 03)
    NO_SUCH_LINK = "link.unknown"
    LINK_OTHER_PORT = "link.other_interface"
    LINK_REFUSED = "link.refused"
    LINK_MODE = "link.mode"
    LINK_KEYS = "link.keys"
    LINK_REPEATED = "link.request_repeated"
    LINK_HALF_OPEN_LIMIT = "link.half_open_limit"
    LINK_SIGNATURE = "link.proof_signature"
    LINK_UNEXPECTED = "link.unexpected"
    LINK_CONTEXT = "link.context_unknown"
    LINK_IDENTIFY = "link.identify"
    LINK_TOKEN = "link.token"
    PACKET_NO_HANDLER = "link.packet_no_handler"
    LINK_MODE_CLAMPED = "violation.link_mode"
    LINK_UNPROVED = "violation.link_unproved"
    LINK_HOPS = "link.hops"
    LINK_TABLE_FULL = "link.table_full"
    # Requests (protocol 03, section 15)
    REQUEST_UNREADABLE = "malformed.request"
    RESPONSE_UNREADABLE = "malformed.response"
    REQUEST_TOO_LARGE = "request.too_large"
    REQUEST_NO_HANDLER = "request.no_handler"
    REQUEST_REFUSED = "request.refused"
    RESPONSE_UNEXPECTED = "response.unexpected"
    # Channels (protocol 05)
    CHANNEL_NOT_OPEN = "channel.not_open"
    CHANNEL_TOKEN = "channel.token"
    CHANNEL_DUPLICATE = "channel.duplicate"
    CHANNEL_TOO_FAR = "channel.too_far_ahead"
    CHANNEL_BACKLOG = "channel.reader_behind"
    CHANNEL_TYPE = "channel.type_unknown"
    CHANNEL_PAYLOAD = "channel.payload_unreadable"
    STREAM_NO_READER = "stream.no_reader"
    # Sending
    TX_OFFLINE = "tx.interface_offline"
    TX_QUEUE_FULL = "tx.queue_full"
    TX_CONNECTION_LOST = "tx.connection_lost"
    # Datagrams and devices (protocol 09, 4.5)
    TX_TOO_LARGE = "tx.too_large"
    TX_UNREACHABLE = "tx.unreachable"
    TX_NO_BUFFERS = "tx.no_buffers"
    TX_DEVICE_DOWN = "tx.device_down"
    TX_REFUSED = "tx.refused"
    TX_UNKNOWN = "tx.outcome_unknown"
    RX_REFUSED = "rx.refused"
    # IP datagrams on a TUN device
    IP_MALFORMED = "ip.malformed"
    IP_CHECKSUM = "ip.checksum"
    IP_FRAGMENT = "ip.fragment"
    IP_PROTOCOL = "ip.protocol"
    IP_OTHER_ADDRESS = "ip.other_address"
    IP_OTHER_PORT = "ip.other_port"
    IP_UNKNOWN_PEER = "ip.unknown_peer"
    ICMP_TOO_BIG = "icmp.too_big"
    ICMP_UNREACHABLE = "icmp.unreachable"
    ICMP_OTHER = "icmp.other"
