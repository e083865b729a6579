"""What the trainers of a device are given: a Llama's shape, random weights made where they are used, random rows."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.models.random_llama import SIZES, config_of
from tllm.planner.cost.flops import training_flops
from tllm.spec.families import spec_from_config
from tllm.spec.model_spec import ModelSpec
from tllm.training.job.job import Job
from tllm.training.state.initial_weights import STD, InitialWeights
from tllm.weights.load import Progress

SHAPES = {
    "tiny": dict(zip(SIZES, (64, 2, 4, 2, 160, 256), strict=True)),
    "0.5b": dict(zip(SIZES, (1536, 12, 24, 8, 6144, 32000), strict=True)),
    "1b": dict(zip(SIZES, (2048, 16, 32, 8, 8192, 32000), strict=True)),
    "1b-128k": dict(zip(SIZES, (2048, 16, 32, 8, 8192, 128256), strict=True)),
    "3b": dict(zip(SIZES, (3072, 28, 24, 8, 8192, 128256), strict=True)),
}
"""Those of Llama 3.2 in their layers, "1b" with a small vocabulary too."""

STEPS = 1_000_000
"""More than any run takes: it is ended from outside, so that it saves nothing."""

ROWS_KEPT = 16
"""Rows of the file, which the run takes in turn."""

SHORTEST = 64
"""Tokens of the shortest document where rows are packed."""


@dataclass(frozen=True)
class Work:
    """Steps of `microbatches` times `rows` rows of `length` tokens; each row is a document, or `packed` of several."""

    shape: str
    length: int
    rows: int
    microbatches: int
    dtype: str
    packed: bool = False

    @property
    def config(self) -> dict[str, Any]:
        return config_of(SHAPES[self.shape], self.dtype, self.length, eps=1e-5, theta=5e5)

    @property
    def spec(self) -> ModelSpec:
        return spec_from_config(self.config)

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.length * self.rows * self.microbatches

    @property
    def documents(self) -> list[int]:
        """Tokens of each document of a row, as even rows of packed ones would have."""
        if not self.packed:
            return [self.length]
        dice, left, lengths = random.Random(0), self.length, []
        while left > 0:
            length = min(left, dice.randint(SHORTEST, self.length // 2))
            lengths.append(length)
            left -= length
        return lengths

    @property
    def flops(self) -> float:
        """Of a step's products, forward and backward: 6 for each weight that a token meets, and attention as masked."""
        lengths = self.documents * (self.rows * self.microbatches)
        return training_flops(self.spec, lengths, self.tokens - len(lengths))

    @property
    def flops_unmasked(self) -> float:
        """As torchtitan counts them: attention as if every token met every other one of its row."""
        spec = self.spec
        core = 12 * spec.num_layers * spec.num_heads * spec.head_dim * self.length
        matrices = training_flops(spec, [1], 1) - 12 * spec.num_layers * spec.num_heads * spec.head_dim
        return (matrices + core) * self.tokens

    def job(self, folder: Path) -> Job:
        """The job of our run; its config and its rows are written into the folder."""
        (folder / "config.json").write_text(json.dumps(self.config))
        dice, vocab = random.Random(0), SHAPES[self.shape]["vocab_size"]
        with (folder / "rows.jsonl").open("w") as file:
            for _ in range(ROWS_KEPT):
                for length in self.documents:
                    file.write(json.dumps({"input_ids": [dice.randrange(vocab) for _ in range(length)]}) + "\n")
        return Job(
            output_dir=str(folder / "run"),
            train_files=(str(folder / "rows.jsonl"),),
            config_name=str(folder / "config.json"),
            max_steps=STEPS,
            save_steps=STEPS,
            seq_len=self.length,
            global_batch_size=self.rows * self.microbatches,
            microbatch_size=self.rows,
            learning_rate=1e-4,
            lr_scheduler_type="constant",
            weight_decay=0.1,
            shuffle=False,
            packing=self.packed,
            mirror_steps=0,
            dtype=self.dtype,
        )


@dataclass(frozen=True)
class WeightsOfDevice(InitialWeights):
    """Random weights drawn by the device itself, which takes a moment where the processor would take minutes."""

    def filler(
        self, spec: ModelSpec, seed: int, dtype: str, progress: Progress | None = None
    ) -> Callable[[nn.Module], object]:
        def fill(module: nn.Module) -> None:
            with torch.no_grad():
                for parameter in module.parameters():
                    if parameter.ndim > 1:
                        parameter.normal_(std=STD)
                    else:
                        parameter.fill_(1.0)

        return fill
