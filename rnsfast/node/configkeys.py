"""The option names of the configuration file.  Protocol 07, sections 2.2 to 2.5.

Used to tell a misspelt option from one that is right but that nothing here reads (yet): files written for other
implementations must load without complaints about options that are correct.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

#: Values that must not appear in a message or a log.
SECRET_KEYS: Final = frozenset({"passphrase", "pass_phrase", "rpc_key"})

#: Options where a character lost to a comment breaks the connection with the other side without any visible sign.
EXACT_KEYS: Final = SECRET_KEYS | {"network_name", "networkname"}


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_INGRESS: Final = _names(
    "ic_max_held_announces ic_burst_hold ic_burst_penalty ic_held_release_interval ic_new_time ic_burst_freq_new"
    " ic_burst_freq ic_pr_burst_freq_new ic_pr_burst_freq egress_control ec_pr_freq"
)

RETICULUM_KEYS: Final = _INGRESS | _names(
    "share_instance instance_name shared_instance_type shared_instance_port instance_control_port rpc_key"
    " enable_transport static_transport_identity local_hops_delta network_identity link_mtu_discovery"
    " use_implicit_proof enable_remote_management remote_management_allowed respond_to_probes"
    " enable_interface_management panic_on_interface_error force_shared_instance_bitrate publish_blackhole"
    " blackhole_sources blackhole_update_interval discover_interfaces required_discovery_value"
    " interface_discovery_sources autoconnect_discovered_interfaces autoconnect_unverified_implementations"
    " autoconnect_interface_mode autoconnect_interface_gravity autoconnect_announces_to_internal default_gravity"
    " default_ar_target default_ar_penalty default_ar_grace qlen_in_data qlen_in_announce qlen_in_pr qlen_in_il"
)

LOGGING_KEYS: Final = frozenset({"loglevel", "logtimestamps"})

#: Options of every interface type. `transport_identity` comes from discovery's suggested sections; nothing reads it.
COMMON_KEYS: Final = _INGRESS | _names(
    "type enabled interface_enabled mode interface_mode outgoing bitrate gravity network_name networkname passphrase"
    " pass_phrase ifac_size announce_cap announce_rate_target announce_rate_grace announce_rate_penalty"
    " ingress_control recursive_prs announces_from_internal announces_to_internal bootstrap_only discoverable"
    " announce_interval discovery_name reachable_on location_cmd discovery_stamp_value discovery_encrypt publish_ifac"
    " latitude longitude height discovery_frequency discovery_bandwidth discovery_modulation discovery_lxmf_address"
    " ignore_config_warnings transport_identity"
)

_BACKBONE: Final = (
    "target_host remote target_port port listen_ip listen_on listen_port device prefer_ipv6 i2p_tunneled"
    " connect_timeout max_reconnect_tries block_fast_flapping fast_flapping_threshold fast_flapping_grace"
    " fast_flapping_block_time"
)
_SERIAL: Final = "port speed databits parity stopbits"
_KISS: Final = f"{_SERIAL} preamble txtail persistence slottime flow_control"
_RADIO: Final = "frequency bandwidth txpower spreadingfactor codingrate"
_RNODE: Final = f"port {_RADIO} flow_control id_interval id_callsign airtime_limit_short airtime_limit_long"

#: Options of each stock type beyond the common ones.
TYPE_KEYS: Final[Mapping[str, frozenset[str]]] = {
    kind: _names(keys)
    for kind, keys in {
        "AutoInterface": "group_id discovery_scope discovery_port data_port multicast_address_type devices"
        " ignored_devices",
        "BackboneInterface": _BACKBONE,
        "BackboneClientInterface": _BACKBONE,
        "TCPClientInterface": "target_host target_port kiss_framing i2p_tunneled connect_timeout max_reconnect_tries"
        " fixed_mtu",
        "TCPServerInterface": "listen_ip listen_port port device prefer_ipv6 i2p_tunneled",
        "UDPInterface": "listen_ip listen_port forward_ip forward_port device port",
        "SerialInterface": _SERIAL,
        "KISSInterface": f"{_KISS} id_interval id_callsign",
        "AX25KISSInterface": f"{_KISS} callsign ssid",
        "PipeInterface": "command respawn_delay",
        "I2PInterface": "peers connectable",
        "RNodeInterface": _RNODE,
        "RNodeMultiInterface": "port id_interval id_callsign",
        "WeaveInterface": "port",
    }.items()
}

#: Options of the third-level sections of an RNodeMultiInterface.
RADIO_KEYS: Final = _names(f"enabled interface_enabled vport outgoing {_RNODE}")
