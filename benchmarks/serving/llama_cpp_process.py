"""llama.cpp in this process, asked as `one_process` asks tllm: a line of JSON.

Run by a Python that has llama-cpp-python: `PYTHON llama_cpp_process.py FILE.gguf THREADS PROMPT REPLY REPEATS`. It
imports nothing of this repository.
"""

from __future__ import annotations

import importlib
import json
import sys
import time


def main() -> None:
    file = sys.argv[1]
    threads, prompt, reply, repeats = map(int, sys.argv[2:])
    peer = importlib.import_module("llama_cpp")
    begun = time.perf_counter()
    sizes = dict(n_ctx=2048, n_batch=512, n_ubatch=512)
    model = peer.Llama(file, n_threads=threads, n_threads_batch=threads, verbose=False, **sizes)
    loaded = time.perf_counter() - begun

    def seconds(start: int, tokens: int) -> float:
        model.reset()
        begun = time.perf_counter()
        model.eval([start, *range(100, 99 + prompt)])
        for _ in range(tokens - 1):
            model.eval([model.sample(temp=0.0)])
        model.sample(temp=0.0)
        return time.perf_counter() - begun

    seconds(1, 3)
    found = [(seconds(10 + i, 1), seconds(50 + i, reply + 1)) for i in range(repeats)]
    prompts, wholes = [one for one, _ in found], [whole for _, whole in found]
    token = (min(wholes) - min(prompts)) / reply
    print(json.dumps(dict(prompt_s=prompts, whole_s=wholes, token_s=token, load_s=loaded, version=peer.__version__)))


if __name__ == "__main__":
    main()
