"""One engine on one device: prompts and replies of a model with random weights, beside what the memory can read.

`python -m benchmarks.devices.serving [--shape 8b] [--sequences 1,8,64] [--prompt 512] [--tokens 128]
[--quantize int4]`

A token of a reply reads every weight once, whatever else it does, so no engine is faster than weights / memory rate.
The rate is measured beside it. Each line is printed as soon as it is known; `--out` appends them as JSON.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.devices.figures import append
from benchmarks.models.random_llama import SIZES, config_of
from tllm.devices.choose import choose_device
from tllm.devices.memory import device_name, held_memory, peak_memory, wait_for
from tllm.engine.decode_graphs import DecodeGraphs
from tllm.engine.engine import Engine
from tllm.engine.measure.quantized_layers import hold_in_few_bits
from tllm.engine.schedule.limits import EngineConfig, limits_of
from tllm.engine.stage import PipelineStage
from tllm.model.transformer import Transformer
from tllm.parallel.quantized_weight import stands_for, weight_bytes
from tllm.parallel.shard import shard_of
from tllm.spec.families import spec_from_config
from tllm.spec.plan import Plan
from tllm.spec.quantized.weight_form import with_weight_form
from tllm.spec.request import SamplingParams

SHAPES = {
    "tiny": dict(zip(SIZES, (256, 2, 8, 4, 512, 1000), strict=True)),
    "1b": dict(zip(SIZES, (2048, 16, 32, 8, 8192, 128256), strict=True)),
    "8b": dict(zip(SIZES, (4096, 32, 32, 8, 14336, 128256), strict=True)),
}
"""Llama 3's."""

STD = 0.02
REPEATS = 3


def llama_config(shape: str) -> dict[str, Any]:
    """A `config.json`."""
    return config_of(SHAPES[shape], "bfloat16", context=8192, eps=1e-5, theta=500000.0)


def parser_of(words: str | None, tokens: int) -> argparse.ArgumentParser:
    """What the engine and its peer are asked, with so many `tokens` after each prompt if nothing is said."""
    parser = argparse.ArgumentParser(description=words, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--sequences", default="1,8,64")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=tokens)
    parser.add_argument("--out", type=Path, help="append lines of JSON to this file")
    return parser


def read_rate(device: torch.device) -> float:
    """Bytes a second that a sum over 4 GiB reads: what a product of one row can reach."""
    x = torch.ones(1 << 30, dtype=torch.float32, device=device)
    return x.nbytes / seconds(lambda: x.sum(), device)


def seconds(work: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    """Of one run of some work, at its best."""
    work()
    best = []
    for _ in range(repeats):
        wait_for(device)
        begun = time.perf_counter()
        work()
        wait_for(device)
        best.append(time.perf_counter() - begun)
    return min(best)


def random_engine(shape: str, device: torch.device, config: EngineConfig) -> Engine:
    """An engine whose weights are drawn on the device, and held in few bits if the config rounds them."""
    spec = spec_from_config(with_weight_form(llama_config(shape), config.quantize, dequantize=False))
    plan = Plan.parse("pp=1", spec.num_layers)

    def draw(_: int, model: Transformer) -> None:
        shards = [shard_of(parameter) for parameter in model.parameters()]
        model.to_empty(device=device)
        for parameter, shard in zip(model.parameters(), shards, strict=True):
            parameter.shard = shard  # type: ignore[attr-defined]  # which moving a parameter forgets
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(1.0) if parameter.dim() == 1 else parameter.normal_(std=STD)
            if spec.quantization is not None:
                hold_in_few_bits(model, spec.quantization)

    return Engine(spec, plan, limits_of(spec, plan, config), torch.bfloat16, draw)


def measure(engine: Engine, sequences: int, prompt: int, tokens: int) -> tuple[float, float]:
    """Seconds of `sequences` prompts together, and of each token after them, at the best of some runs."""
    chance = torch.Generator().manual_seed(sequences)

    def taken(new: int) -> float:
        ids = torch.randint(3, 900, (sequences, prompt), generator=chance).tolist()
        begun = time.perf_counter()
        engine.generate(ids, SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True))
        return time.perf_counter() - begun

    taken(3)
    prompts = [taken(1) for _ in range(REPEATS)]
    wholes = [taken(tokens + 1) for _ in range(REPEATS)]
    return min(prompts), (min(wholes) - min(prompts)) / tokens


def layers_seconds(stage: PipelineStage, sequences: int, device: torch.device) -> float:
    """Of the recorded layers of the last batch alone, without the host; 0 where no graphs are recorded."""
    if not isinstance(stage.graphs, DecodeGraphs):
        return 0.0
    return seconds(stage.graphs.recorded[sequences].graph.replay, device)


def main() -> None:
    parser = parser_of(__doc__, tokens=128)
    parser.add_argument("--quantize", choices=("int8", "int4"), help="hold the weights in few bits")
    args = parser.parse_args()
    device = choose_device(args.device)
    rate = read_rate(device)
    print(f"{device_name(device)}, torch {torch.__version__}: reads {rate / 1e12:.2f} TB/s", flush=True)
    begun = time.perf_counter()
    config = EngineConfig(
        dtype="bfloat16", cache_tokens=65536, max_num_seqs=64, max_num_batched_tokens=4096, quantize=args.quantize
    )
    with random_engine(args.shape, device, config) as engine:
        [stage] = engine.stages
        table = stage.model.embed_tokens.weight  # type: ignore[attr-defined]
        weights = list(stage.model.parameters())  # type: ignore[attr-defined]
        held = sum(map(weight_bytes, weights))
        read = held - weight_bytes(table)
        flops = 2 * sum(stands_for(x)[0].numel() for x in weights if x is not table)  # of a token
        graphs = "recorded steps" if stage.graphs is not None else "no recorded steps"
        opened = time.perf_counter() - begun
        print(f"{args.shape}: {held / 1e9:.2f} GB of weights, made with {graphs} in {opened:.1f} s", flush=True)
        for sequences in map(int, args.sequences.split(",")):
            first, token = measure(engine, sequences, args.prompt, args.tokens)
            layers = layers_seconds(stage, sequences, device)
            keys = sequences * (args.prompt + args.tokens / 2)
            width = 2 * 2 * sum(k.kv_shape[0] * k.kv_shape[1] for k in stage.model.attention_specs().values())  # type: ignore[attr-defined]
            limit = (read + keys * width) / rate
            found = dict(
                by="tllm",
                device=device_name(device),
                torch=str(torch.__version__),
                shape=args.shape,
                quantize=args.quantize,
                sequences=sequences,
                prompt=args.prompt,
                tokens=args.tokens,
                read_rate=rate,
                prompt_seconds=first,
                prompt_flops=sequences * args.prompt * flops / first,
                token_seconds=token,
                limit_seconds=limit,
                of_limit=limit / token,
                layers_seconds=layers,
                held=held_memory(device),
                peak=peak_memory(device),
            )
            print(
                f"{sequences:3} sequences: prompts {first * 1e3:8.1f} ms, {found['prompt_flops'] / 1e12:5.0f} Tflop/s; "
                f"a token {token * 1e3:6.2f} ms, {sequences / token:7.0f} tokens/s, "
                f"{100 * limit / token:3.0f} % of the memory's limit ({limit * 1e3:.2f} ms); "
                f"the recorded layers alone {layers * 1e3:.2f} ms",
                flush=True,
            )
            append(args.out, found)


if __name__ == "__main__":
    main()
