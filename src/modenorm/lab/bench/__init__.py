"""Benchmarks: one layer against torch's norms and the copy floor, and whole training steps."""
