"""IP over a link: what the system routes into a TUN device comes out of the peer's.  docs/tun.md, Gateway mode."""

from rnsfast.gateway.door import APP, ASPECT, tunnel_hash
from rnsfast.gateway.gateway import Device, Gateway, GatewayConfig
from rnsfast.gateway.links import State
from rnsfast.gateway.lost import Lost

__all__ = ["APP", "ASPECT", "Device", "Gateway", "GatewayConfig", "Lost", "State", "tunnel_hash"]
