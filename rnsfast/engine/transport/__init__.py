"""Carrying other people's traffic.  Protocol 02.

`relay` is the data plane: tables in, batches in, batches out. Everything else is the control plane, which fills the
tables: announces (`rebroadcast`, `outlets`, `ingress`, `rates`, `modes`), path requests (`search`), links in transit
(`engine.linktable`), tunnels and blackholed identities. `transport.Transport` joins them.
"""
