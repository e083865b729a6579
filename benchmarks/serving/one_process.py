"""One engine in this process: seconds of a prompt and of each token after it, as a line of JSON.

`python -m benchmarks.serving.one_process FOLDER FORMAT THREADS PROMPT REPLY REPEATS`, FORMAT being bfloat16, float16,
int8 or int4 (the last two with bfloat16 activations).
"""

from __future__ import annotations

import json
import sys
import time

import torch

from tllm.engine.engine import Engine
from tllm.engine.schedule.limits import EngineConfig
from tllm.kernels.float_product import choices
from tllm.spec.quantized.weight_form import Quantize
from tllm.spec.request import SamplingParams

ROUNDED: dict[str, Quantize] = {"int8": "int8", "int4": "int4"}


def main() -> None:
    folder, form, *numbers = sys.argv[1:]
    threads, prompt, reply, repeats = map(int, numbers)
    torch.set_num_threads(threads)
    quantize = ROUNDED.get(form)
    config = EngineConfig(dtype="bfloat16" if quantize else form, quantize=quantize, cache_tokens=4096)
    begun = time.perf_counter()
    with Engine.load(folder, "pp=1", config) as engine:
        loaded = time.perf_counter() - begun

        def seconds(start: int, tokens: int) -> float:
            """Of a prompt that begins as no other does, and its reply."""
            ids = [start, *range(100, 99 + prompt)]
            params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
            begun = time.perf_counter()
            engine.generate([ids], params)
            return time.perf_counter() - begun

        seconds(1, 3)  # products are chosen, caches and threads are made
        found = [(seconds(10 + i, 1), seconds(50 + i, reply + 1)) for i in range(repeats)]
    prompts, wholes = [one for one, _ in found], [whole for _, whole in found]
    chosen = {
        f"{kind.rows} rows, {kind.outputs} x {kind.columns}": choice.name for kind, choice in choices.known.items()
    }
    token = (min(wholes) - min(prompts)) / reply
    print(json.dumps(dict(prompt_s=prompts, whole_s=wholes, token_s=token, load_s=loaded, products=chosen)))


if __name__ == "__main__":
    main()
