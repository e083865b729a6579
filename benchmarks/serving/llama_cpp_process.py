"""llama.cpp in this process, asked as `one_process` asks tllm: lines of JSON.

Run by a Python that has llama-cpp-python: `PYTHON llama_cpp_process.py FILE.gguf THREADS PROMPT REPLY`. It imports
nothing of this repository.
"""

from __future__ import annotations

import importlib
import itertools
import json
import sys
import time


def main() -> None:
    file = sys.argv[1]
    threads, prompt, reply = map(int, sys.argv[2:])
    peer = importlib.import_module("llama_cpp")
    begun = time.perf_counter()
    sizes = dict(n_ctx=2048, n_batch=512, n_ubatch=512)
    model = peer.Llama(file, n_threads=threads, n_threads_batch=threads, verbose=False, **sizes)
    loaded = time.perf_counter() - begun

    def answer(first: int, tokens: int) -> dict[str, object]:
        model.reset()
        times = [time.perf_counter()]
        model.eval([first, *range(100, 99 + prompt)])
        for _ in range(tokens):
            token = model.sample(temp=0.0)
            times.append(time.perf_counter())
            model.eval([token])
        model.sample(temp=0.0)
        times.append(time.perf_counter())
        prompt_s, *token_s = (after - before for before, after in itertools.pairwise(times))
        return {"prompt_s": prompt_s, "token_s": token_s}

    answer(1, 3)
    print(json.dumps({"load_s": loaded}), flush=True)
    for line in sys.stdin:
        print(json.dumps({**answer(int(line), reply), "version": peer.__version__}), flush=True)


if __name__ == "__main__":
    main()
