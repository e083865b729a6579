"""`least_of_whole_layers`: a job and its devices in the units of `cut_bound`, rounded so that no plan takes less of the
forms that are searched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from tllm.planner.bounds.cut_bound import SentGradients, SizedStep, least_of_cuts
from tllm.planner.bounds.replica_microbatches import DeviceClasses, StepWork
from tllm.planner.cost.activations import Microbatch, layer_bytes
from tllm.planner.cost.flops import attention_flops, layer_flops, logits_flops
from tllm.planner.cost.rank_bytes import end_parameters, layer_parameters
from tllm.planner.cost.rank_work import TrainingFacts, both_passes, forward_only_layers
from tllm.spec.cut import Cut, cut_stage
from tllm.spec.model_spec import ModelSpec

HIDES, HIDES_WITH_WAITS = 2 / 3, 3 / 4
"""Part of a microbatch's time, at most, that its backward pass hides: two thirds, and where ranks of context
parallelism wait for one another up to three quarters."""


class RankSize(NamedTuple):
    """A size of microbatches, each of which so many ranks share, and what devices reach with it."""

    facts: TrainingFacts
    ranks: int
    rates: Sequence[tuple[float, float]]
    """Flop/s of layers and of logits, by device."""


def least_of_whole_layers(
    spec: ModelSpec,
    sizes: Sequence[RankSize],
    bandwidths: Sequence[float],
    memories: Sequence[float],
    least: float,
    most: float,
) -> float:
    """Seconds that plans without tensor parallelism take at least with microbatches of one of these sizes, or `most` if
    that is less; `least` are known already. Of the devices: bytes per second to any other, and bytes beside a
    process."""
    (whole,) = cut_stage(spec, (1,))
    sent = _gradients(spec, whole, sizes[0].facts, len(memories))
    steps = dict[object, SizedStep]()
    for size in sorted(sizes, key=lambda size: size.ranks):
        step = _sized(spec, whole, size, bandwidths, memories)
        # Of parts that are as large, as of 4 rows on 2 ranks and of 8 on 4, fewer ranks have fewer rows to fill.
        steps.setdefault((replace(step.work, rows=0, ranks=0), step.devices), step)
    return least_of_cuts(list(steps.values()), sent, least, most)


def _sized(
    spec: ModelSpec, whole: Cut, size: RankSize, bandwidths: Sequence[float], memories: Sequence[float]
) -> SizedStep:
    layer = _row_flops(spec, whole, size.facts)
    logits = both_passes(size.facts, _row_logits(spec, whole, size.facts))
    seconds = [layer / of_layers for of_layers, _ in size.rates]
    worth = min(logits / of_logits / one for (_, of_logits), one in zip(size.rates, seconds, strict=True))
    return SizedStep(_work(spec, whole, size, worth), _classes(seconds, bandwidths, memories))


def _row_flops(spec: ModelSpec, whole: Cut, facts: TrainingFacts) -> float:
    """Of one row through the lightest layer, forward and, where all of them learn, backward."""
    of_batch = list[float]()
    for layer in set(spec.layers):
        forward = layer_flops(spec, layer, whole, facts.lengths, facts.before)
        core = attention_flops(spec, layer, whole, facts.lengths, facts.before)
        of_batch.append(forward if forward_only_layers(spec, facts) else both_passes(facts, forward, core))
    return min(of_batch) / facts.microbatch_size


def _row_logits(spec: ModelSpec, whole: Cut, facts: TrainingFacts) -> float:
    return logits_flops(spec, whole, facts.predicted) / facts.microbatch_size


def _work(spec: ModelSpec, whole: Cut, size: RankSize, logits: float) -> StepWork:
    facts, kinds = replace(size.facts, microbatch_size=1), set(spec.layers)
    core = max(
        attention_flops(spec, layer, whole, facts.lengths, facts.before)
        / layer_flops(spec, layer, whole, facts.lengths, facts.before)
        for layer in kinds
    )
    is_known = facts.shared_prompts is None and not any(layer.moe for layer in kinds)
    is_known &= not forward_only_layers(spec, facts)  # layers that run no backward pass keep nothing for it
    weights = min(_elements(spec, whole)) * facts.learned_bytes if facts.adapter is None else 0.0
    hides = HIDES if size.ranks == 1 else HIDES_WITH_WAITS
    return StepWork(
        layers=spec.num_layers,
        rows=size.facts.microbatches * size.facts.microbatch_size,
        part=_part(size),
        ranks=size.ranks,
        logits=logits,
        hides=hides + core / 9,
        kept=float(min(_kept(spec, whole, facts))) if is_known else 0.0,
        weights=weights if is_known else 0.0,
    )


def _part(size: RankSize) -> tuple[float, float]:
    """Rows of a microbatch that a rank computes at least, two pieces of twice as many as there are ranks; and rows that
    count for it, which are those of all ranks shared out, as they do equally many microbatches."""
    tokens, rows = sum(size.facts.lengths), size.facts.microbatch_size
    computed = 2 * (tokens // (2 * size.ranks)) if size.ranks > 1 else tokens
    return computed * rows / tokens, rows / size.ranks


def _kept(spec: ModelSpec, whole: Cut, facts: TrainingFacts) -> list[int]:
    """Bytes that each kind of layer keeps of one row more, if attention's core is recomputed."""

    def of_rows(rows: int) -> list[int]:
        lengths = facts.lengths * rows
        batch = Microbatch(lengths, sum(lengths), sum(lengths), 0, facts.item_bytes)
        return [layer_bytes(spec, layer, whole, batch, selective=True) for layer in dict.fromkeys(spec.layers)]

    return [two - one for one, two in zip(of_rows(1), of_rows(2), strict=True)]


def _elements(spec: ModelSpec, whole: Cut) -> list[int]:
    return [sum(one.elements for one in layer_parameters(spec, layer, whole)) for layer in dict.fromkeys(spec.layers)]


def _gradients(spec: ModelSpec, whole: Cut, facts: TrainingFacts, devices: int) -> SentGradients:
    """What stages send of gradients; nothing where it is not known that messages outlast the passes: of an adapter, of
    experts, late, between local steps, or as few numbers."""
    is_little = facts.adapter is not None or any(layer.moe for layer in spec.layers)
    if is_little or facts.late or facts.local or facts.compression == "powersgd":
        return SentGradients(0.0, 0.0, 0.0, 0.0, 0.0)
    end = range(spec.num_layers - 1, spec.num_layers)
    last = 0 if spec.tied else sum(one.elements for one in end_parameters(spec, end, whole)[1])
    layer, w = min(_elements(spec, whole)), facts.full_precision_bytes
    # Each bucket of an all-reduce is divided, and each of its parts, with less than an element over for each rank.
    buckets = 2 + (sum(_elements(spec, whole)) * spec.num_layers + last) * w / facts.bucket_bytes
    share = facts.gradient_share([], spec.hidden_size)
    return SentGradients(float(layer), float(last), devices * buckets, w * share, float(facts.learned_bytes))


def _classes(seconds: Sequence[float], bandwidths: Sequence[float], memories: Sequence[float]) -> DeviceClasses:
    """Each device in one of two classes of speed, link and memory, of which each counts as its best."""
    speeds = [1 / one for one in seconds]
    classes = [_two_classes(amounts) for amounts in (speeds, bandwidths, memories)]
    is_fast, is_linked, is_large = (
        [amount > low for amount in amounts]
        for (low, _), amounts in zip(classes, (speeds, bandwidths, memories), strict=True)
    )
    both = sum(fast and linked for fast, linked in zip(is_fast, is_linked, strict=True))
    holders = (len(speeds), sum(is_fast), sum(is_linked), both, sum(is_large))
    (slow, fast), (slow_link, fast_link), (little, much) = classes
    return DeviceClasses(1 / slow, 1 / fast, slow_link, fast_link, little, much, holders)


def _two_classes(amounts: Sequence[float]) -> tuple[float, float]:
    """The largest amount of the lower class, and of all: the classes lie where one amount is most times the one before.
    Of equal amounts all are of the lower class."""
    different = sorted(set(amounts))
    steps = [(high / low, low) for low, high in pairwise(different)]
    return max(steps)[1] if steps else different[0], different[-1]
