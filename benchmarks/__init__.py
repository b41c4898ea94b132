"""Benchmarks: each script opens with the question it answers and saves figures beside versions and hardware."""
