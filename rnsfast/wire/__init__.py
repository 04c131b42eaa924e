"""Bytes of the Reticulum protocol to small values and back: pure functions, no clock, no I/O, no state."""
