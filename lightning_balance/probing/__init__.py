"""Micro-batches that are run to learn about a machine, outside of training: their time and their memory (layer 2)."""
