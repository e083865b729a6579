"""Slower machines and slower networks, emulated on one computer, and a cluster of `tllm` on them."""
