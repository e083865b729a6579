"""Seconds of the pieces of a layer, forward and backward, by each way that torch has: what the trainer's choice is
made from. `python -m benchmarks.devices.training_pieces [--tokens 16384]`
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tllm.devices.memory import device_name

WARM, TIMED = 3, 10
Way = Callable[..., Tensor]


def seconds(run: Callable[[], object]) -> float:
    """Of one call, by the device's own clock."""
    for _ in range(WARM):
        run()
    event: Callable[..., Any] = torch.cuda.Event
    began, ended = event(enable_timing=True), event(enable_timing=True)
    began.record()
    for _ in range(TIMED):
        run()
    ended.record()
    torch.cuda.synchronize()
    return float(began.elapsed_time(ended)) / TIMED / 1e3


def there_and_back(name: str, way: Way, *inputs: Tensor, flops: float = 0.0, back: float = 3.5) -> None:
    """Print what a way takes forward, and forward and backward together, which are `back` times the flops."""
    try:
        begun = time.perf_counter()
        y = way(*inputs)
        gradient = torch.randn_like(y)
        learned = [x for x in inputs if x.requires_grad]

        def both() -> None:
            torch.autograd.grad(way(*inputs), learned, gradient)

        both()
        torch.cuda.synchronize()
        first = time.perf_counter() - begun
        with torch.no_grad():
            forward = seconds(partial(way, *inputs))
        whole = seconds(both)
    except RuntimeError as error:
        print(f"{name:42} {str(error).splitlines()[0][:110]}", flush=True)
        return
    rate = f" {flops / forward / 1e12:5.0f} {back * flops / whole / 1e12:5.0f} Tflop/s" if flops else ""
    print(f"{name:42} {forward * 1e6:8.0f} {whole * 1e6:8.0f} us{rate}   first {first:.2f} s", flush=True)


def attentions(tokens: int, length: int, heads: int, kv: int, width: int) -> None:
    device = torch.device("cuda")
    rows = tokens // length
    qkv = torch.randn(tokens, heads + 2 * kv, width, dtype=torch.bfloat16, device=device, requires_grad=True)
    flops = 4 * width * heads * rows * length * (length + 1) / 2
    starts = torch.arange(rows + 1, dtype=torch.int32, device=device) * length

    def packed(qkv_TMH: Tensor) -> Tensor:
        q, k, v = torch.split(qkv_TMH, [heads, kv, kv], dim=1)
        out: Tensor = torch.ops.aten._flash_attention_forward(
            q, k, v, starts, starts, length, length, 0.0, True, False, scale=width**-0.5
        )[0]
        return out

    def fused(backends: list[SDPBackend], qkv_TMH: Tensor) -> Tensor:
        split = torch.split(qkv_TMH, [heads, kv, kv], dim=1)
        q, k, v = (x.reshape(rows, length, *x.shape[1:]).transpose(1, 2) for x in split)
        with sdpa_kernel(backends):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv)

    named = {"torch's choice": list(SDPBackend.__members__.values())}
    named |= {name: [SDPBackend.__members__[name]] for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION")}
    print(f"attention of {rows} x {length}, {heads} heads of {width} over {kv}")
    for name, backends in named.items():
        there_and_back(f"  {name}", partial(fused, [b for b in backends if b.name != "ERROR"]), qkv, flops=flops)
    there_and_back("  flash, varlen", packed, qkv, flops=flops)


def rms_norm(x: Tensor, w: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * w


def gate(x: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return F.silu(a) * b


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


def elementwise(tokens: int, width: int, inner: int) -> None:
    make = partial(torch.randn, dtype=torch.bfloat16, device="cuda")
    x, w = make(tokens, width, requires_grad=True), make(width, requires_grad=True)
    h = make(tokens, 2 * inner, requires_grad=True)
    q, cos, sin = make(tokens, width // 64, 64, requires_grad=True), make(tokens, 1, 64), make(tokens, 1, 64)
    for name, way, inputs in (("norm", rms_norm, (x, w)), ("gate", gate, (h,)), ("rope", rotate, (q, cos, sin))):
        there_and_back(f"{name}, torch's steps", way, *inputs)
        there_and_back(f"{name}, compiled", torch.compile(way), *inputs)
    there_and_back("norm, F.rms_norm", lambda x, w: F.rms_norm(x, (width,), w, 1e-5), x, w)
    there_and_back("norm, F.rms_norm then weight", lambda x, w: F.rms_norm(x, (width,), None, 1e-5) * w, x, w)


def products(tokens: int) -> None:
    """Rates of square products, of a layer's products, and of copies."""
    for name, (m, k, n) in {
        **{f"square {size}": (size, size, size) for size in (128, 256, 512, 1024, 2048, 4096, 8192)},
        "qkv": (tokens, 2048, 3072),
        "out": (tokens, 2048, 2048),
        "gate and up": (tokens, 2048, 16384),
        "down": (tokens, 8192, 2048),
        "logits, 32,000": (tokens, 2048, 32000),
        "logits, 128,256": (tokens, 2048, 128256),
    }.items():
        x = torch.randn(m, k, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        w = torch.randn(n, k, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        there_and_back(f"product, {name}", F.linear, x, w, flops=2.0 * m * k * n, back=3.0)
    x = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    taken = seconds(lambda: x.clone())
    print(f"a copy moves {2 * x.nbytes / taken / 1e12:.2f} TB/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    tokens = parser.parse_args().tokens
    print(device_name(torch.device("cuda", 0)), torch.__version__, flush=True)
    attentions(tokens, 4096, 32, 8, 64)
    attentions(tokens, 4096, 16, 4, 128)
    attentions(tokens, 512, 32, 8, 64)
    elementwise(tokens, 2048, 8192)
    products(tokens)


if __name__ == "__main__":
    main()
