"""How far the engine's log-probabilities are from the trainer's: `python -m benchmarks.training.log_prob_mismatch`.

Three families, in float32 and bfloat16, with and without `deterministic = true`, under plans of engine and trainer that
are unlike. Nothing is timed, so the machine need not be quiet.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import markdown
from benchmarks.report.curves import Axes, svg
from benchmarks.report.markdown import percent
from benchmarks.report.results import BENCHMARKS, Page, write
from tests.support.models.families import save_model
from tests.support.training.post_training.unlike_plans import job_of, sampled_rows, told, trained

KIND = "log-prob-mismatch"
FAMILIES = ("llama", "qwen3_moe", "qwen3_5")
SHAPE: dict[str, Any] = dict(hidden_size=128, intermediate_size=256, head_dim=16, vocab_size=2048)
PLANS = ("pp=1, pp=1", "tp=2, pp=2")
EQUAL_PLANS = ("pp=1, pp=1", "pp=2, dp=4")
CASES = {
    "bfloat16": ("bfloat16", False, PLANS),
    "float32": ("float32", False, PLANS),
    "bfloat16, deterministic": ("bfloat16", True, EQUAL_PLANS),
    "float32, deterministic": ("float32", True, EQUAL_PLANS),
}
"""Each with its dtype, and plans of engine and trainer; what is deterministic cuts no matrix."""
LEAST, MOST = -8.0, 1.0
"""Powers of ten between which differences are drawn."""


def measured(folder: Path, dtype: str, deterministic: bool, plans: str) -> dict[str, Any]:
    """Of every sampled token, how far one side's number is from the other's."""
    engine, trainer = plans.split(", ")
    job = job_of(folder, dtype, deterministic)
    rows = sampled_rows(engine, job)
    told_L, found_L = told(rows), trained(trainer, job, rows)
    off_L, ratio_L = (found_L - told_L).abs(), (found_L - told_L).exp()
    return {
        "tokens": len(off_L),
        "equal": float((off_L == 0).double().mean()),
        "mean": float(off_L.mean()),
        "max": float(off_L.max()),
        "largest log-probability": float(told_L.abs().max()),
        "ratio": [float(ratio_L.min()), float(ratio_L.max())],
        "at most 10^x": {
            f"{power / 4:.2f}": float((off_L <= 10 ** (power / 4)).double().mean())
            for power in range(int(4 * LEAST), int(4 * MOST) + 1)
        },
    }


def main() -> None:
    raw: dict[str, dict[str, dict[str, Any]]] = {}
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as place:
            save_model(family, Path(place), **SHAPE)
            for name, (dtype, deterministic, plans) in CASES.items():
                for one in plans:
                    found = measured(Path(place), dtype, deterministic, one)
                    raw.setdefault(family, {})[f"{name}: {one}"] = found
                    print(family, name, one, found["mean"], found["max"], flush=True)
    picture = BENCHMARKS / "training" / "results" / f"{KIND}.svg"
    picture.write_text(drawn(raw))
    write(page(raw), raw)


def drawn(raw: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """For each family, which share of tokens differs by at most so much."""
    panels = {
        family: {
            _curve(name): [(float(power), share) for power, share in one["at most 10^x"].items()]
            for name, one in cases.items()
            if name.endswith((PLANS[1], EQUAL_PLANS[1]))
        }
        for family, cases in raw.items()
    }
    powers = {float(power): f"1e{power}" for power in range(int(LEAST), int(MOST) + 1, 2)}
    shares = {share / 4: percent(share / 4).replace(".0", "") for share in range(5)}
    title = "difference of two log-probabilities, at most"
    return svg(panels, Axes(title, (LEAST, MOST), powers, "share of tokens", (0.0, 1.02), shares))


PURPOSE = """Whether the engine that samples a run's completions and the trainer that learns from them agree on how
likely each token was. Of 12 completions of 24 tokens, sampled at temperature 1 from random models of 4 layers of width
128 and a vocabulary of 2,048, both sides' log-probabilities of each token are compared. Nothing is timed."""
MEANING = """Cells are the mean and the largest absolute difference, and in brackets the share of tokens whose two
numbers have the same bits. In float32 they differ by {float32} at most, of log-probabilities down to -{largest}; in
bfloat16 by {bfloat16}, so that one pass of GRPO begins with importance ratios between {low} and {high}. With
`deterministic = true` all {tokens} numbers are the same to the bit in either dtype, on one stage and on two, and every
ratio is 1.

![Which share of tokens differs by at most so much]({kind}.svg)"""
LIMITS = """- Small random models on one processor: larger ones sum over more columns and layers, and differ by more
  where they differ.
- What is deterministic computes each layer's forward pass once more, in sums of float64, and goes over a gated delta
  net a token at a time. What that takes is not measured here.
- `deterministic = true` refuses tp, cp and ep, so their rows are of runs without it."""


def page(raw: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Page:
    """The page of raw figures."""
    rows = [["plans of engine, trainer", *raw]]
    for name in next(iter(raw.values())):
        rows.append([name, *(_cell(cases[name]) for cases in raw.values())])

    def of(start: str, is_exact: bool = False) -> list[Mapping[str, Any]]:
        named = ((name, one) for cases in raw.values() for name, one in cases.items())
        return [one for name, one in named if name.startswith(start) and ("determ" in name) == is_exact]

    exact = of("float32", True) + of("bfloat16", True)
    assert all(one["max"] == 0 for one in exact), "what the page says of them"
    ratios = [bound for one in of("bfloat16") for bound in one["ratio"]]
    meaning = MEANING.format(
        float32=f"{max(one['max'] for one in of('float32')):.1e}",
        bfloat16=f"{max(one['max'] for one in of('bfloat16')):.2f}",
        largest=math.ceil(max(one["largest log-probability"] for one in of("float32"))),
        low=f"{min(ratios):.2f}",
        high=f"{max(ratios):.2f}",
        tokens=f"{sum(one['tokens'] for one in exact):,}",
        kind=KIND,
    )
    title = "Log-probabilities of rollouts and of training"
    return Page("training", KIND, title, PURPOSE, markdown.table(rows), meaning, LIMITS)


def _curve(name: str) -> str:
    kind, plans = name.split(": ")
    engine, trainer = plans.split(", ")
    return f"{kind}: engine {engine}, trainer {trainer}"


def _cell(one: Mapping[str, Any]) -> str:
    return f"{one['mean']:.1e}, {one['max']:.1e} ({percent(one['equal'])})" if one["max"] else "equal to the bit"


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
