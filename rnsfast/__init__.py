"""rnsfast: a fast, batching implementation of the Reticulum network stack, wire-compatible with rns."""
