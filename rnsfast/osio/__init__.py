"""Operating-system back ends that move packets in batches."""
