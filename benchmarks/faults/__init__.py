"""Benchmarks of faults: what is noticed, what goes on, and after how many seconds."""
