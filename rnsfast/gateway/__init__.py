"""IP over a link: what the system routes into a TUN device comes out of the peer's.  docs/tun.md, Gateway mode."""
