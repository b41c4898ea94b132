"""What can be said about a machine from measured micro-batches: where to measure, what fits, how well (layer 0)."""
