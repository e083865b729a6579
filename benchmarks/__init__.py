"""Benchmarks of together-LLM, one folder for each subject; README.md is their index."""
