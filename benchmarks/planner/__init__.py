"""Benchmarks of the planner: predicted times and memory beside measured and published ones."""
