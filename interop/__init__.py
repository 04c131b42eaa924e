"""Everything that needs a stock `rns` node: harness, peers, proxy, and the scenarios that use them."""
