"""Prints the GB/s at which torch.sum reads float32 numbers from memory: the least that a product with weights must do.

`python -m benchmarks.serving.memory_read_rate THREADS`
"""

from __future__ import annotations

import sys
import time

import torch


def main() -> None:
    torch.set_num_threads(int(sys.argv[1]))
    numbers, best = torch.ones(2**28), 0.0
    for _ in range(8):
        start = time.perf_counter()
        numbers.sum()
        best = max(best, numbers.nbytes / (time.perf_counter() - start) / 1e9)
    print(best)


if __name__ == "__main__":
    main()
