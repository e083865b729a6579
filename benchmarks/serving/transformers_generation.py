"""The requests of `openai_client.measure`, computed by `transformers`; prints the same figures as one line of JSON.

Under torchrun and with --tp it uses the tensor parallelism of `transformers`.
"""

from __future__ import annotations

import argparse
import json
import os
import time

import torch
from transformers import AutoModelForCausalLM

from benchmarks.serving.openai_client import prompt_of


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tp", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    more = {"tp_plan": "auto"} if options.tp else {}
    model = AutoModelForCausalLM.from_pretrained(options.folder, dtype=getattr(torch, options.dtype), **more)
    model.eval()  # type: ignore[no-untyped-call]
    out: dict[str, list[float]] = {"decode_tok_s": [], "prefill_tok_s": [], "eight_tok_s": []}
    with torch.inference_mode():
        run(model, [prompt_of(64, 1000)], 8)
        for turn in range(options.repeats):
            first, last, _ = run(model, [prompt_of(128, 10 + turn)], 64)
            out["decode_tok_s"].append(63 / (last - first))
            out["prefill_tok_s"].append(512 / run(model, [prompt_of(512, 20 + turn)], 1)[0])
            _, last, tokens = run(model, [prompt_of(128, 100 * turn + i) for i in range(8)], 64)
            out["eight_tok_s"].append(tokens / last)
    if int(os.environ.get("RANK", 0)) == 0:
        print(json.dumps(out))


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
