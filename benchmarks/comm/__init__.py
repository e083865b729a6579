"""Benchmarks of communication: collectives, links, the cost of TLS and health checks."""
