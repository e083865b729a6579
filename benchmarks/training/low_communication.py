"""What data parallelism that sends less costs in loss, and what it saves in bytes.

    python -m benchmarks.training.low_communication TEXT_FILE [--ranks 4] [--steps 300] [--seeds 2] [--threads 1]

A small Llama is trained on the bytes of a text, once with every way of summing gradients and every seed. Its replicas
are threads of this process. All ways see the same rows at the same steps. The last tenth of the text is for validation.
Bytes are counted on the links; the seconds at 100 Mbit/s are computed from the bytes, not measured.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.report import markdown
from benchmarks.report.markdown import percent
from benchmarks.report.results import Page, write
from tllm.comm.collectives.group import Group, local_groups, solo
from tllm.model.transformer import build
from tllm.parallel.mesh import whole
from tllm.parallel.replicated import ReplicatedParameters
from tllm.spec.families import spec_from_config
from tllm.spec.pipeline_schedule import build as build_schedule
from tllm.training.attention.packed_attention import TrainAttend
from tllm.training.data.batch_tensors import Tokens
from tllm.training.data.seeds import seed_for
from tllm.training.gradients.bucket_layout import BucketLayout
from tllm.training.gradients.compressed_reduction import Bf16Reduction, Int8Reduction
from tllm.training.gradients.delayed_reduction import DelayedReduction
from tllm.training.gradients.gradient_buckets import GradientBuckets
from tllm.training.gradients.gradient_clipping import GradientNorm
from tllm.training.gradients.powersgd import PowerSGD
from tllm.training.gradients.reduction import Exact, GradientGroups, Reduction
from tllm.training.objectives.next_token import NextTokenLoss
from tllm.training.optim.optimizer import AdamW
from tllm.training.optim.sharded_update import OptimizerUpdate
from tllm.training.state.initial_weights import fill_randomly
from tllm.training.step.model_chunks import parameters_of
from tllm.training.step.pipeline_step import TrainStage, run_schedule
from tllm.training.step.pipeline_wires import Wires
from tllm.training.sync.diloco import DiLoCo

CONFIG: dict[str, Any] = dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    vocab_size=256,
    hidden_size=128,
    intermediate_size=344,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=4,
    hidden_act="silu",
    max_position_embeddings=256,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    tie_word_embeddings=False,
    torch_dtype="float32",
)
LENGTH, ROWS, RATE, WARMUP, CLIP = 128, 2, 3e-3, 20, 1.0
DEADLINE = 600.0
LINK = 100e6 / 8  # bytes/s


@dataclass(frozen=True)
class Way:
    """How replicas train together. `every`: local steps between sums (0: a sum in each step), with the `outer` learning
    rate and momentum. `late`: whether a sum is used one step after it began.
    """

    name: str
    reduction: Callable[[GradientBuckets, GradientGroups], Reduction] = lambda buckets, groups: Exact()
    every: int = 0
    outer: tuple[float, float] = (0.7, 0.9)
    late: bool = False


WAYS = (
    Way("exact"),
    Way("bf16", lambda buckets, groups: Bf16Reduction()),
    Way("int8", Int8Reduction),
    Way("PowerSGD, rank 4", lambda buckets, groups: PowerSGD(buckets, 4, groups)),
    Way("delayed", late=True),
    Way("delayed int8", Int8Reduction, late=True),
    Way("10 local steps", every=10),
    Way("50 local steps", every=50),
    Way("10 local steps, int8", Int8Reduction, every=10),
    Way("10 local steps, plain mean", every=10, outer=(1.0, 0.0)),
)


@dataclass
class Text:
    """Rows of bytes at random places, which depend only on seed, step and row."""

    learned: Tensor
    validation: Tensor
    seed: int

    def batch(self, step: int, first: int, rows: int) -> Tokens:
        return rows_at(self.learned, [self._at(step, first + row) for row in range(rows)])

    def held_back(self, rows: int = 128) -> list[Tokens]:
        places = np.linspace(0, len(self.validation) - LENGTH - 1, rows).astype(int).tolist()
        return [rows_at(self.validation, places[i : i + 16]) for i in range(0, rows, 16)]

    def _at(self, step: int, row: int) -> int:
        return seed_for(self.seed, step, row) % (len(self.learned) - LENGTH - 1)


def rows_at(text: Tensor, places: list[int]) -> Tokens:
    ids = torch.cat([text[at : at + LENGTH] for at in places]).long()
    labels = torch.cat([text[at + 1 : at + LENGTH + 1] for at in places]).long()
    return Tokens(ids, labels, torch.arange(LENGTH).repeat(len(places)), [LENGTH] * len(places))


@dataclass
class Replica:
    """One rank with the whole model."""

    dp: Group
    links: Group
    way: Way
    text: Text
    steps: int
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        spec = spec_from_config(CONFIG)
        self.mesh = whole(spec)
        self.chunks = [build(spec, self.mesh, torch.float32).requires_grad_()]
        parameters = parameters_of(self.chunks)
        fill_randomly(parameters, spec, self.text.seed)
        groups = GradientGroups(self.dp)
        inner = GradientGroups(solo()) if self.way.every else groups
        layout = BucketLayout(parameters, inner, bucket_bytes=1 << 20)
        self.buckets = GradientBuckets(layout, ReplicatedParameters(parameters, solo()))
        self.update, self.norm = OptimizerUpdate(self.buckets, AdamW(beta2=0.95), 0.1), GradientNorm(self.buckets)
        reduction = self.way.reduction(self.buckets, groups)
        self.late = DelayedReduction(self.buckets, reduction, GradientGroups(self.links)) if self.way.late else None
        outer = (self.way.every, *self.way.outer, reduction)
        self.local = DiLoCo(self.update, groups, *outer) if self.way.every else None
        if not self.local:
            self.buckets.reduction = self.late or reduction

    def learn(self) -> float:
        """Take all steps and return the validation loss after them."""
        for step in range(1, self.steps + 1):
            self._step(step)
        if self.late:
            self.late.drain()
            self._apply(self.steps)
        loss = self._validate() if self.dp.rank == 0 else 0.0
        if self.late:
            self.late.close()
        self.buckets.close()
        return loss

    def sent(self) -> int:
        """Bytes that this rank has sent so far."""
        return sum(link.bytes_moved for group in (self.dp, self.links) for link in group.send.values())

    def _step(self, step: int) -> None:
        tokens = self.text.batch(step, self.dp.rank * ROWS, ROWS)
        shared = 1 if self.local else self.dp.size
        some = self.late is None or self.late.on_the_way
        self.buckets.begin(1)
        stage = TrainStage(0, self.chunks, Wires(), NextTokenLoss(self.mesh))
        scale = 1 / (tokens.predicted * shared)
        result = run_schedule(build_schedule("gpipe", 1, 1), stage, [tokens], scale)
        self.losses.append(result.loss_sum / tokens.predicted)
        self.buckets.finish()
        if some:
            self._apply(step - 1 if self.late else step)
        if self.local:
            self.local.count_step(tokens.predicted)
            if self.local.is_due(step) or step == self.steps:
                self.local.outer_step()

    def _apply(self, step: int) -> None:
        self.norm.clip(CLIP)
        cosine = 0.55 + 0.45 * math.cos(math.pi * step / self.steps)
        self.update.apply(step, RATE * min(step / WARMUP, 1.0) * cosine)

    @torch.no_grad()
    def _validate(self) -> float:
        (model,), total, count = self.chunks, 0.0, 0
        for tokens in self.text.held_back():
            attend = TrainAttend(model.attention_specs(), tokens)
            x_TD = model(tokens.ids_T, tokens.positions_T, attend, tokens.lengths_T)
            total += float(NextTokenLoss(self.mesh)(model, x_TD, tokens).loss)
            count += tokens.predicted
        return total / count


def measure(way: Way, text: Text, ranks: int, steps: int) -> dict[str, float]:
    """The losses, the bytes that a rank sent in a step, and the seconds of the run."""
    groups = zip(local_groups(ranks, DEADLINE, "dp"), local_groups(ranks, DEADLINE, "late"), strict=True)
    replicas = [Replica(dp, late, way, text, steps) for dp, late in groups]
    start = time.perf_counter()
    with ThreadPoolExecutor(ranks) as pool:
        validation = max(pool.map(Replica.learn, replicas))
    sent = [replica.sent() for replica in replicas]
    last = [loss for replica in replicas for loss in replica.losses[-20:]]
    return {
        "train": statistics.fmean(last),
        "validation": validation,
        "bytes": max(sent) / steps,
        "seconds": time.perf_counter() - start,
    }


PURPOSE = """Which ways of sending less between replicas keep the loss, and how many bytes they save. A Llama of 4
layers and width 128 is trained on the bytes of a text by {ranks} replicas with {rows} rows of {length} bytes each, for
{steps} steps of AdamW; means over seeds: {seeds}. All ways see the same rows."""
READING = """`less` is how many times fewer bytes a step sends than exact sums do. Seconds at 100 Mbit/s are computed
from the bytes; none is measured. Compression of 16 and 8 bits with error feedback is the safe choice; PowerSGD and
local steps (DiLoCo) send far less and learn more slowly in so short a run."""
LIMITS = """- One small model, a short run, few seeds: differences of a percent are noise.
- Delayed sums were run at the learning rate of the others, which is too high for them.
- Replicas are threads of one process on a machine with other work: no time here is a measure of speed."""


def page(raw: dict[str, Any]) -> Page:
    """The page of raw figures: the `runs` of every way, and the `settings`."""
    purpose = PURPOSE.format(**raw["settings"], rows=ROWS, length=LENGTH)
    title = "Data parallelism that sends less: loss and bytes"
    return Page("training", "low-communication", title, purpose, table(raw["runs"]), READING, LIMITS)


def table(results: dict[str, list[dict[str, float]]]) -> str:
    titles = ["way", "training loss, last 20 steps", "validation loss", "against exact", "bytes a step", "less"]
    rows = [[*titles, "s at 100 Mbit/s"]]
    exact = {key: statistics.fmean(run[key] for run in results["exact"]) for key in ("validation", "bytes")}
    for name, runs in results.items():
        mean = {key: statistics.fmean(run[key] for run in runs) for key in runs[0]}
        losses = [f"{mean['train']:.3f}", f"{mean['validation']:.3f}"]
        price = percent(mean["validation"] / exact["validation"] - 1, sign=True)
        saved = f"{exact['bytes'] / mean['bytes']:.1f} x"
        rows.append([name, *losses, price, f"{mean['bytes']:,.0f}", saved, f"{mean['bytes'] / LINK:.3f}"])
    return markdown.table(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    whole_text = torch.frombuffer(bytearray(options.text.read_bytes()), dtype=torch.uint8)
    border = len(whole_text) * 9 // 10
    results: dict[str, list[dict[str, float]]] = {way.name: [] for way in WAYS}
    for seed in range(options.seeds):
        for way in WAYS:
            text = Text(whole_text[:border], whole_text[border:], seed)
            results[way.name].append(measure(way, text, options.ranks, options.steps))
            print(way.name, seed, results[way.name][-1], flush=True)
    settings = {name: getattr(options, name) for name in ("ranks", "steps", "seeds")}
    raw = {"config": CONFIG, "settings": settings, "runs": results}
    write(page(raw), raw)


if __name__ == "__main__":
    main()
