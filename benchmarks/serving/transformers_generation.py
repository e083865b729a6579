"""The requests of `openai_client.measure`, computed by `transformers` in turns (`alternating_processes.Contender`): for
each number of a turn that is read, the figures of that repeat are printed as a line of JSON.

Under torchrun and with --tp it uses the tensor parallelism of `transformers`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from benchmarks.serving.openai_client import prompt_of


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tp", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    more = {"tp_plan": "auto"} if options.tp else {}
    model = AutoModelForCausalLM.from_pretrained(options.folder, dtype=getattr(torch, options.dtype), **more)
    model.eval()  # type: ignore[no-untyped-call]
    with torch.inference_mode():
        run(model, [prompt_of(64, 1000)], 8)
        show({})
        while (turn := next_turn()) >= 0:
            show(figures(model, turn))


def figures(model: torch.nn.Module, turn: int) -> dict[str, list[float]]:
    first, last, _ = run(model, [prompt_of(128, 10 + turn)], 64)
    decode = 63 / (last - first)
    prefill = 512 / run(model, [prompt_of(512, 20 + turn)], 1)[0]
    _, last, tokens = run(model, [prompt_of(128, 100 * turn + i) for i in range(8)], 64)
    return {"decode_tok_s": [decode], "prefill_tok_s": [prefill], "eight_tok_s": [tokens / last]}


def is_first() -> bool:
    return int(os.environ.get("RANK", 0)) == 0


def show(found: dict[str, list[float]]) -> None:
    if is_first():
        print(json.dumps(found), flush=True)


def next_turn() -> int:
    """The number that the first rank reads, on all ranks; -1 when there are no more."""
    number = torch.tensor(int(sys.stdin.readline() or -1) if is_first() else 0)
    if dist.is_initialized():
        dist.broadcast(number, 0)
    return int(number)


def run(model: torch.nn.Module, prompts: list[list[int]], count: int) -> tuple[float, float, int]:
    """Seconds to the first and to the last token of a greedy batch, and how many tokens there were."""
    ids, cache, first = torch.tensor(prompts), None, 0.0
    start = time.perf_counter()
    for _ in range(count):
        out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, ids = out.past_key_values, out.logits[:, -1:].argmax(-1)
        ids = getattr(ids, "full_tensor", lambda ids=ids: ids)()
        first = first or time.perf_counter() - start
    return first, time.perf_counter() - start, count * len(prompts)


if __name__ == "__main__":
    main()
