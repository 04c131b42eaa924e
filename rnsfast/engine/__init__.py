"""The protocol as a sans-I/O state machine: time, randomness and packets come in as arguments."""
