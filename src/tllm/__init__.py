"""together-LLM: one language model, split over several ordinary machines.

from tllm import LLM, SamplingParams, train

with LLM("models/tiny", plan="pp=2") as llm:
    print(llm.generate("def main():", SamplingParams(max_tokens=32, temperature=0))[0].text)
train("job.toml", plan="dp=2")
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # that of `typing`, which takes longer to load than all else before `tllm` can answer a Ctrl-C
if TYPE_CHECKING:
    from typing import Any

    from tllm.api.llm import LLM, Embedding, Generation
    from tllm.api.lora_request import LoRARequest
    from tllm.api.trainer import Trainer, TrainResult, train
    from tllm.spec.request import SamplingParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "Embedding",
    "Generation",
    "LoRARequest",
    "SamplingParams",
    "TrainResult",
    "Trainer",
    "__version__",
    "train",
]

PLACES = {
    "LLM": "tllm.api.llm",
    "Embedding": "tllm.api.llm",
    "Generation": "tllm.api.llm",
    "LoRARequest": "tllm.api.lora_request",
    "SamplingParams": "tllm.spec.request",
    "TrainResult": "tllm.api.trainer",
    "Trainer": "tllm.api.trainer",
    "train": "tllm.api.trainer",
}


def __getattr__(name: str) -> Any:
    """Load what is asked for when it is asked for, so that `tllm --help` answers at once."""
    if name not in PLACES:
        raise AttributeError(f"module 'tllm' has no attribute {name!r}")
    return getattr(importlib.import_module(PLACES[name]), name)
