"""Networks of transport nodes in virtual time."""
