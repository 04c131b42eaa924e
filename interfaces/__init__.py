"""Interface types: each turns batches of the operating system into batches of packets and back."""
