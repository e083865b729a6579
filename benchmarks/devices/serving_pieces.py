"""What the pieces of a step of replies take on a device: products of few rows by each way, as rates of reading weights.

`python -m benchmarks.devices.serving_pieces`
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from benchmarks.devices.serving import read_rate
from tllm.devices.choose import choose_device
from tllm.devices.memory import device_name
from tllm.kernels.gpu.skinny_matmul import skinny_matmul

SHAPES = {
    "qkv": (6144, 4096),
    "out": (4096, 4096),
    "gate and up": (28672, 4096),
    "down": (4096, 14336),
    "logits": (128256, 4096),
}
WAYS = {"F.linear": F.linear, "skinny": skinny_matmul}
MANY_BYTES = 1 << 30
PLAYS = 5


def graph_seconds(way: object, x: torch.Tensor, weights: list[torch.Tensor]) -> float:
    """Of one product, of many weights in turn that no cache holds, started by a graph."""
    for weight in weights[:2]:
        way(x, weight)  # type: ignore[operator]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            way(x, weight)  # type: ignore[operator]
    best = float("inf")
    for _ in range(PLAYS):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(stop) / 1e3 / len(weights))
    return best


@torch.inference_mode()
def main() -> None:
    device = choose_device("cuda:0")
    print(f"{device_name(device)}, torch {torch.__version__}: reads {read_rate(device) / 1e12:.2f} TB/s", flush=True)
    for rows in (1, 8, 64):
        for name, (outputs, columns) in SHAPES.items():
            one = outputs * columns * 2
            weights = [
                torch.randn(outputs, columns, device=device, dtype=torch.bfloat16)
                for _ in range(max(1, MANY_BYTES // one))
            ]
            x = torch.randn(rows, columns, device=device, dtype=torch.bfloat16)
            taken = {way: graph_seconds(call, x, weights) for way, call in WAYS.items()}
            told = ", ".join(f"{way} {s * 1e6:6.1f} us {one / s / 1e12:4.2f} TB/s" for way, s in taken.items())
            print(f"{rows:3} rows, {name:12} {outputs} x {columns}: {told}", flush=True)


if __name__ == "__main__":
    main()
