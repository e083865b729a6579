"""Benchmarks of clusters as such: what the coordinator of very many nodes takes."""
