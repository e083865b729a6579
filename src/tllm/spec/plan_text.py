"""The parts of a plan's short form, `pp=2,tp=1+2,layers=10+22`: reading one value, refusing what is none."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tllm.ground.errors import PlanError
from tllm.ground.words import nearest

WORDS = {"true": True, "false": False}


def pairs(text: str, keys: Collection[str]) -> dict[str, str]:
    """The values by key, each key once."""
    given: dict[str, str] = {}
    for part in filter(None, text.replace(" ", "").split(",")):
        key, equals, value = part.partition("=")
        if key not in keys or not equals or not value:
            raise PlanError(f"plan {text!r}: {part!r} is not understood", nearest(key, keys))
        if key in given:
            raise PlanError(f"plan {text!r} gives {key} twice", "give it once")
        given[key] = value
    return given


def number(text: str, key: str, least: int = 1) -> int:
    """A whole number."""
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise PlanError(f"{key}={text!r} is not a whole number of {least} or more", f"for example {key}=2")
    return int(text)


def numbers(text: str, key: str, between: str, least: int = 1) -> tuple[int, ...]:
    """Whole numbers joined by `between`; 2*62 stands for 62 times 2."""
    found: list[int] = []
    for part in text.split(between):
        one, _, times = part.partition("*")
        found += [number(one, key, least)] * (number(times, key) if times else 1)
    return tuple(found)


def choice(text: str, key: str, known: Sequence[str]) -> str:
    """One of the known words."""
    if text not in known:
        raise PlanError(f"{key}={text} is not known", f"one of {', '.join(known)}")
    return text


def truth(text: str, key: str) -> bool:
    """`true` or `false`."""
    return WORDS[choice(text, key, tuple(WORDS))]


def bounds(layers: Sequence[int], runs: int, num_layers: int) -> list[int]:
    """Where each run of layers starts, and the end. Left out: as even as can be, the later ones taking what is over."""
    if not layers:
        return [num_layers * i // runs for i in range(runs + 1)]
    counts = layers if len(layers) == runs else tuple(layers) * runs
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    return starts


def shares_of(lists: Sequence[tuple[int, ...]], stage: int, tps: Sequence[int]) -> tuple[int, ...]:
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
            f"shares {':'.join(map(str, lists[0]))} are for {len(lists[0])} ranks and no stage has so many "
            f"(tp={list(tps)})",
            "give as many shares as a stage has ranks",
        )
    return lists[0] if len(lists[0]) == tp else (1,) * tp


def ranks(given: dict[str, str]) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """The tp of the stages and the lists of shares, as given."""
    tps = numbers(given.get("tp", "1"), "tp", "+")
    lists = [numbers(one, "shares", ":") for one in given.get("shares", "").split("+") if one]
    return tps, lists


def stages(
    text: str,
    given: dict[str, str],
    chunks: int,
    tps: tuple[int, ...],
    shares: list[tuple[int, ...]],
    layers: tuple[int, ...],
) -> int:
    """How many pipeline stages the lists speak of."""
    counts = [len(one) for one in (tps, shares) if len(one) > 1]
    if len(layers) > 1:
        if len(layers) % chunks:
            raise PlanError(
                f"plan {text!r} gives layers of {len(layers)} runs and chunks={chunks}", "give stages times chunks runs"
            )
        counts.append(len(layers) // chunks)
    pp = number(given["pp"], "pp") if "pp" in given else max(counts, default=1)
    if any(count != pp for count in counts):
        raise PlanError(
            f"plan {text!r} speaks of {pp} stages and of {next(count for count in counts if count != pp)}",
            "give one value for all stages, or one for each, joined by +",
        )
    return pp


def replicas(text: str) -> tuple[int, ...]:
    shares = numbers(text, "dp", ":")
    return (1,) * shares[0] if len(shares) == 1 else shares


def depth(text: str) -> int | tuple[int, ...]:
    depths = numbers(text, "depth", "+", 0)
    return depths[0] if len(depths) == 1 else depths
