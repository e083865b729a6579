"""Reads the short form of a plan, `pp=2,tp=1+2,layers=10+22`, into the values of its fields.

    pp       pipeline stages
    tp       tensor-parallel ranks of each stage: one number for all stages, or one for each, joined by "+"
    layers   layers of each run: one number for all, or one for each, joined by "+"
    shares   shares of a stage's ranks, joined by ":": one list for every stage with so many ranks, or one for each
             stage, joined by "+"
    dp       equal replicas; or the shares of unequal ones, joined by ":" (dp=3:1: the first of two replicas takes
             three of four microbatches)

All other keys take one value, and `depth` one for each hop too. What is left out is even, or as in `Plan`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from tllm.core.errors import PlanError, counted, nearest
from tllm.spec.grid.grid_shape import MODES
from tllm.spec.pipeline_schedule import CHUNKED, ORDERS

SERVING = ("pp", "tp", "layers", "shares", "experts", "tensor")
TRAINING = (
    *("dp", "cp", "ep", "zero", "schedule", "depth", "chunks", "sequence", "recompute", "offload"),
    "servers",
)
KEYS = SERVING + TRAINING
CHOICES = {
    "tensor": MODES,
    "experts": ("cut", "spread"),
    "zero": ("0", "1", "2", "3"),
    "schedule": tuple(ORDERS),
    "recompute": ("none", "layer", "selective"),
    "offload": ("none", "host", "disk"),
}

BOOLEANS = {"true": True, "false": False}


MAX_RANKS = 1 << 20
"""So many ranks, stages and runs of layers a plan may have: thousands of machines are planned, and no list is built of
what nobody has."""

MAX_SHARE = 10**18 - 1

ONE_REPLICA = (1,)
"""The share of a single replica. One object: a plan's JSON form leaves out a field that is its default itself."""


class RunFields(NamedTuple):
    """Layers [start, stop) and the shares of the ranks that hold them."""

    start: int
    stop: int
    shares: tuple[int, ...]


class PlanFields(NamedTuple):
    """The value of each field of a `Plan` under its name, the stages as `runs`; words are among the `CHOICES`."""

    runs: tuple[RunFields, ...]
    experts: str
    tensor: str
    dp: tuple[int, ...]
    cp: int
    ep: int
    zero: int
    schedule: str
    depth: int | tuple[int, ...]
    chunks: int
    sequence: bool
    recompute: str
    offload: str
    servers: int


def read_fields(text: str, num_layers: int) -> PlanFields:
    """The fields of a plan for a model of `num_layers` layers. Raises PlanError where a value cannot be read."""
    given = _pairs(text)
    chunks = _number(given.get("chunks", "1"), "chunks")
    layers = _numbers(given["layers"], "layers", "+") if "layers" in given else ()
    of_stages = _stages(text, given, chunks, layers)
    pp = len(of_stages)
    _check_product("stages times chunks", pp, chunks)
    bounds = _bounds(layers, pp * chunks, num_layers)
    runs = tuple(RunFields(bounds[run], bounds[run + 1], of_stages[run % pp]) for run in range(pp * chunks))
    for key, known in CHOICES.items():
        if key in given:
            _choice(given[key], key, known)
    return PlanFields(
        runs=runs,
        experts=given.get("experts", "cut"),
        tensor=given.get("tensor", "1d"),
        dp=_replica_shares(given.get("dp", "1")),
        cp=_number(given.get("cp", "1"), "cp"),
        ep=_number(given.get("ep", "1"), "ep"),
        zero=int(given.get("zero", "0")),
        schedule=given.get("schedule", CHUNKED[0] if chunks > 1 else "1f1b"),
        depth=_depth(given.get("depth", "1")),
        chunks=chunks,
        sequence=BOOLEANS[_choice(given.get("sequence", "false"), "sequence", tuple(BOOLEANS))],
        recompute=given.get("recompute", "none"),
        offload=given.get("offload", "none"),
        servers=_number(given.get("servers", "0"), "servers", 0),
    )


def rank_count(text: str) -> int:
    """Ranks that hold one model by a plan, however many layers it has. PlanError where a value cannot be read, or for a
    key that says more than who holds what of a model."""
    given = _pairs(text)
    if others := [key for key in given if key not in SERVING or key == "tensor"]:
        raise PlanError(
            f"plan {text!r} gives {others[0]}, and one copy of a model answers, for single rows",
            f"give {' and '.join(SERVING[:2])} alone: more copies are more nodes",
        )
    return sum(map(len, _stages_of(text, given)))


def divides_layers(text: str) -> bool:
    """Whether several ranks have parts of one layer by such a plan."""
    return any(len(shares) > 1 for shares in _stages_of(text, _pairs(text)))


def _stages_of(text: str, given: dict[str, str]) -> list[tuple[int, ...]]:
    """The shares of each stage's ranks, of a model with any number of layers."""
    layers = _numbers(given["layers"], "layers", "+") if "layers" in given else ()
    return _stages(text, given, 1, layers)


def _stages(text: str, given: dict[str, str], chunks: int, layers: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The shares of each stage's ranks."""
    tps = _numbers(given.get("tp", "1"), "tp", "+")
    shares = [_numbers(part, "shares", ":", most=MAX_SHARE) for part in given.get("shares", "").split("+") if part]
    lengths = [len(values) for values in (tps, shares) if len(values) > 1]
    pp = _stage_count(text, given, chunks, layers, lengths)
    _check_product("ranks", pp if len(tps) == 1 else 1, sum(tps))
    tps = tps * pp if len(tps) == 1 else tps
    return [_stage_shares(shares, stage, tps) for stage in range(pp)]


def _pairs(text: str) -> dict[str, str]:
    """The values by key. Raises PlanError for a key that is not known or is given twice."""
    given: dict[str, str] = {}
    for part in filter(None, text.replace(" ", "").split(",")):
        key, equals, value = part.partition("=")
        if key not in KEYS:
            raise PlanError(f"plan {text!r}: {part!r} is not understood", nearest(key, KEYS))
        if not equals or not value:
            raise PlanError(f"plan {text!r}: {part!r} has no value", f"write {key}=…, as in pp=2,tp=1+2")
        if key in given:
            raise PlanError(f"plan {text!r} gives {key} twice", "give it once")
        given[key] = value
    return given


def _number(text: str, key: str, least: int = 1, most: int = MAX_RANKS) -> int:
    """A whole number from `least` to `most`."""
    digits = text.lstrip("0") or "0"
    if not text.isascii() or not text.isdigit() or (digits == "0" and least):
        raise PlanError(f"{key}={text[:40]!r} is not a whole number of {least} or more", f"for example {key}=2")
    if len(digits) > len(str(most)) or int(digits) > most:
        given = digits if len(digits) < 40 else f"a number of {len(digits)} digits"
        raise PlanError(f"{key} is {given}, and a plan has {most:,} at most", f"for example {key}=2")
    return int(digits)


def _numbers(text: str, key: str, separator: str, least: int = 1, most: int = MAX_RANKS) -> tuple[int, ...]:
    """Whole numbers joined by `separator`; 2*62 stands for 62 times 2."""
    numbers: list[int] = []
    for part in text.split(separator):
        value, _, times = part.partition("*")
        repeats = _number(times, key) if times else 1
        _check_product(f"values of {key}", 1, len(numbers) + repeats)
        numbers += [_number(value, key, least, most)] * repeats
    return tuple(numbers)


def _check_product(what: str, times: int, count: int) -> None:
    """Refuse a plan of more than can be, before it is built."""
    if times * count > MAX_RANKS:
        raise PlanError(f"the plan has {times * count:,} {what}, and at most {MAX_RANKS:,} are planned", "give fewer")


def _choice(text: str, key: str, known: Sequence[str]) -> str:
    """One of the known words."""
    if text not in known:
        raise PlanError(f"{key}={text} is not known", f"one of {', '.join(known)}")
    return text


def _replica_shares(text: str) -> tuple[int, ...]:
    """`2` are two equal replicas; `3:1` are the shares of two unequal ones."""
    shares = _numbers(text, "dp", ":")
    return ONE_REPLICA * shares[0] if len(shares) == 1 else shares


def _depth(text: str) -> int | tuple[int, ...]:
    """One number for all hops, or one for each."""
    depths = _numbers(text, "depth", "+", 0)
    return depths[0] if len(depths) == 1 else depths


def _bounds(layers: Sequence[int], runs: int, num_layers: int) -> list[int]:
    """The layer at which each run starts, and the end of the model.

    Without `layers` the runs are as even as can be, the later ones taking what is left over.
    """
    if not layers:
        return [num_layers * run // runs for run in range(runs + 1)]
    counts = layers if len(layers) == runs else tuple(layers) * runs
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    return starts


def _stage_shares(lists: Sequence[tuple[int, ...]], stage: int, tps: Sequence[int]) -> tuple[int, ...]:
    """The shares of one stage's ranks: even, from its own list, or from the one list for stages of that many ranks."""
    tp = tps[stage]
    if not lists:
        return (1,) * tp
    if len(lists) > 1:
        if len(lists[stage]) != tp:
            raise PlanError(f"stage {stage} has tp={tp} and {len(lists[stage])} shares", "give one share for each rank")
        return lists[stage]
    if len(lists[0]) not in tps:
        raise PlanError(
            f"shares {':'.join(map(str, lists[0]))} are for {counted(len(lists[0]), 'rank')} and no stage has so many "
            f"(tp={list(tps)})",
            "give as many shares as a stage has ranks",
        )
    return lists[0] if len(lists[0]) == tp else (1,) * tp


def _stage_count(text: str, given: dict[str, str], chunks: int, layers: Sequence[int], lengths: Collection[int]) -> int:
    """The number of pipeline stages: `pp`, or that of the lists, whose `lengths` and `layers` must agree with it."""
    counts = list(lengths)
    if len(layers) > 1:
        if len(layers) % chunks:
            raise PlanError(
                f"plan {text!r} gives layers of {len(layers)} runs and chunks={chunks}", "give stages times chunks runs"
            )
        counts.append(len(layers) // chunks)
    pp = _number(given["pp"], "pp") if "pp" in given else max(counts, default=1)
    if any(count != pp for count in counts):
        raise PlanError(
            f"plan {text!r} speaks of {counted(pp, 'stage')} and of {next(count for count in counts if count != pp)}",
            "give one value for all stages, or one for each, joined by +",
        )
    return pp
