"""One engine in this process, asked by turns: seconds of a prompt and of each token after it, as lines of JSON.

`python -m benchmarks.serving.one_process FOLDER FORMAT THREADS PROMPT REPLY`, FORMAT being bfloat16, float16, int8 or
int4 (the last two with bfloat16 activations). The first line says that the model is loaded and products are chosen.
Each line of stdin then asks for a prompt that begins with this token and as no other does, and for a reply.
"""

from __future__ import annotations

import itertools
import json
import sys
import time

import torch

from tllm.core.program import reexecute_to_compute
from tllm.engine.engine import Engine
from tllm.engine.schedule.limits import EngineConfig
from tllm.kernels.float_product import choices
from tllm.spec.quantized.weight_form import Quantize
from tllm.spec.request import Request, SamplingParams

ROUNDED: dict[str, Quantize] = {"int8": "int8", "int4": "int4"}


def main() -> None:
    reexecute_to_compute()  # as commands of tllm do
    folder, form, *numbers = sys.argv[1:]
    threads, prompt, reply = map(int, numbers)
    torch.set_num_threads(threads)
    quantize = ROUNDED.get(form)
    config = EngineConfig(dtype="bfloat16" if quantize else form, quantize=quantize, cache_tokens=4096)
    begun = time.perf_counter()
    with Engine.load(folder, "pp=1", config) as engine:
        loaded = time.perf_counter() - begun

        def answer(first: int, tokens: int) -> dict[str, object]:
            params = SamplingParams(max_tokens=tokens + 1, temperature=0.0, ignore_eos=True)
            times = [time.perf_counter()]
            stream = engine.submit(
                Request(id=f"turn-{first}", prompt_ids=(first, *range(100, 99 + prompt)), params=params)
            )
            times += [time.perf_counter() for _ in stream]
            prompt_s, *token_s = (after - before for before, after in itertools.pairwise(times))
            return {"prompt_s": prompt_s, "token_s": token_s}

        answer(1, 3)  # products are chosen, caches and threads are made
        print(json.dumps({"load_s": loaded}), flush=True)
        for line in sys.stdin:
            found = answer(int(line), reply)
            chosen = {f"{of.rows} rows, {of.outputs} x {of.columns}": way.name for of, way in choices.known.items()}
            print(json.dumps({**found, "products": chosen}), flush=True)


if __name__ == "__main__":
    main()
