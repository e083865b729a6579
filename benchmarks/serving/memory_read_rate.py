"""Prints the GB/s at which torch.mv reads bfloat16 weights larger than the caches.

`python -m benchmarks.serving.memory_read_rate THREADS`
"""

from __future__ import annotations

import sys
import time

import torch


def main() -> None:
    torch.set_num_threads(int(sys.argv[1]))
    weights = [torch.randn(4096, 2048).to(torch.bfloat16) for _ in range(60)]
    x, best = torch.ones(2048, dtype=torch.bfloat16), 0.0
    for _ in range(8):
        start = time.perf_counter()
        for one in weights:
            torch.mv(one, x)
        best = max(best, 60 * weights[0].nbytes / (time.perf_counter() - start) / 1e9)
    print(best)


if __name__ == "__main__":
    main()
