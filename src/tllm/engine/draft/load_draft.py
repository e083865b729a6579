"""Loads a draft model from its folder, by the code that loads every other model."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tllm.engine.draft.draft_model import DraftModel
from tllm.engine.schedule.batch import PLAIN_GREEDY, Sampling
from tllm.engine.schedule.limits import Limits
from tllm.model.transformer import build
from tllm.parallel.mesh import whole
from tllm.planner.cost.draft_bytes import draft_bytes
from tllm.spec.families import spec_from_config
from tllm.spec.quantized.weight_form import keeps_few_bits
from tllm.spec.speculative_config import SpeculativeConfig
from tllm.weights.byte_source import LocalFiles
from tllm.weights.dtypes import torch_dtype
from tllm.weights.formats.open_index import open_index
from tllm.weights.load import HeldAs, load
from tllm.weights.manifest import checked


class WarmUp:
    """A sequence that nobody asked for."""

    key, token_ids, prompt_length, max_draft_tokens = -1, [0], 1, 2

    def sampling(self) -> Sampling:
        return PLAIN_GREEDY


class DraftLoader:
    """A draft model that is loaded in the thread which is to run it. `model` is None before `load`."""

    def __init__(self, config: SpeculativeConfig, limits: Limits, dtype: str = "") -> None:
        self._config, self._limits, self._dtype = config, limits, dtype
        self.model: DraftModel | None = None

    @property
    def is_here(self) -> bool:
        """Whether this machine has the draft model's files."""
        return Path(self._config.model).exists()

    def load(self) -> None:
        """Read the weights, make the cache, and draft for a sequence of one token: what comes only once has come then.

        ConfigError where the files are not here.
        """
        folder, limits = self._config.model, self._limits
        raw = self._config.read_config()
        spec = spec_from_config(raw)
        dtype = self._dtype or spec.dtype
        model = build(spec, whole(spec), torch_dtype(dtype), "meta")
        source = checked(LocalFiles(folder))
        load(model, open_index(LocalFiles(folder), raw), source, torch_dtype(dtype), held=HeldAs(keeps_few_bits(raw)))
        sizes = draft_bytes(spec, dtype, limits.num_pages, limits.page_size)
        own = msgspec.structs.replace(
            limits,
            num_pages=sizes.pages,
            vocab_size=spec.vocab_size,
            max_model_len=min(limits.max_model_len, spec.max_model_len),
        )
        self.model = DraftModel(model, own, limits.vocab_size)
        first = WarmUp()
        for _ in range(2):
            self.model.propose([first], [2])
        self.model.release(first.key)


def draft_loader(config: SpeculativeConfig | None, limits: Limits, dtype: str = "") -> DraftLoader | None:
    """A loader where there is a draft model to load."""
    return None if config is None or config.folder is None else DraftLoader(config, limits, dtype)
