"""Benchmarks of serving: tokens per second, start-up time, memory, drafted tokens."""
