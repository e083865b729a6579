"""Benchmarks of training: tokens per second, slow links, loss, memory."""
