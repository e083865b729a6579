"""What small models learn in minutes, with curves: `python -m benchmarks.training.experiments.learning [EXPERIMENT …]`.

SFT, LoRA, DPO, GRPO and distillation, each as a job of `tllm train` on one thread, for three seeds that were fixed
beforehand. Nothing is timed, so the machine need not be quiet. Experiments and seeds that are named are run anew, and
the others stay on the page as they are.
"""

from __future__ import annotations

import argparse
import fcntl
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import markdown
from benchmarks.report.curves import axes_for, svg
from benchmarks.report.markdown import percent
from benchmarks.report.results import BENCHMARKS, Page, Provenance, raw_of, write
from benchmarks.training.experiments.adapters import fine_tuned
from benchmarks.training.experiments.counting import counted
from benchmarks.training.experiments.preferences import preferred
from benchmarks.training.experiments.runs import Found
from benchmarks.training.experiments.students import BATCH, OFF, OFF_FORWARD, OFF_NEW, ON, STEPS, corrected, taught
from tests.support.training.post_training.letter_languages import FEW

KIND = "learning"
SEEDS = (1, 2, 3)

Figures = Mapping[str, float]

Raw = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""What was found, by experiment and seed."""


@dataclass(frozen=True)
class Experiment:
    """How one seed is run, in a folder of its own, and what the axes of its curves are."""

    run: Callable[[int, Path], Found]
    x_title: str
    y_title: str
    drawn: tuple[str, ...]
    """The curves that are drawn; the others are in the JSON alone."""

    has_start: bool = True
    """Whether what was before the first step is drawn, or so far above the rest that this would be one line."""


EXPERIMENTS = {
    "fine-tuning": Experiment(
        fine_tuned, "step", "held-out loss, nats a token", ("whole model", "LoRA"), has_start=False
    ),
    "preferences": Experiment(preferred, "step", "held-out pairs", ("margin", "pairs won")),
    "counting": Experiment(counted, "step", "share of completions", ("right", "reward")),
    "taught": Experiment(taught, "step", "held-out loss, nats a token", ("text alone", "taught")),
    "on-policy": Experiment(corrected, "tokens", "KL(student || teacher), own texts", (ON, OFF, OFF_FORWARD, OFF_NEW)),
}


@dataclass(frozen=True)
class Claim:
    """A row of the page: what is claimed, how a seed's figures are shown, and whether they reach the aim."""

    experiment: str
    what: str
    shown: Callable[[Figures], str]
    aim: str
    holds: Callable[[Figures], bool]


def _from_to(before: float, after: float) -> str:
    return f"{before:.3f} to {after:.3f}"


def _shares(before: float, after: float) -> str:
    return f"{percent(before)} to {percent(after)}"


CLAIMS = (
    Claim(
        "fine-tuning",
        "SFT: held-out loss, before and after",
        lambda f: _from_to(f["before"], f["whole"]),
        "lower",
        lambda f: f["whole"] < f["before"],
    ),
    Claim(
        "fine-tuning",
        "LoRA: held-out loss, beside the whole model's",
        lambda f: f"{f['adapter']:.3f} ({percent(f['adapter'] / f['whole'] - 1, sign=True)})",
        "at most 2 % above",
        lambda f: f["adapter"] <= 1.02 * f["whole"],
    ),
    Claim(
        "preferences",
        "DPO: margin of held-out pairs, before and after",
        lambda f: _from_to(f["margin before"], f["margin"]),
        "higher",
        lambda f: f["margin"] > f["margin before"],
    ),
    Claim(
        "preferences",
        "DPO: held-out pairs won",
        lambda f: percent(f["pairs won"]),
        "over 90 %",
        lambda f: f["pairs won"] > 0.9,
    ),
    Claim(
        "preferences",
        "DPO: own replies that are of the wanted kind",
        lambda f: _shares(f["wanted before"], f["wanted"]),
        "more",
        lambda f: f["wanted"] > f["wanted before"],
    ),
    Claim(
        "counting",
        "GRPO: completions that count right, first and last 400",
        lambda f: _shares(f["before"], f["after"]),
        "under 20 % to over 80 %",
        lambda f: f["before"] < 0.2 and f["after"] > 0.8,
    ),
    Claim(
        "taught",
        "Distilled student: held-out loss, beside text alone (teacher)",
        lambda f: f"{f['taught']:.3f}, {f['alone']:.3f} ({f['teacher']:.3f})",
        "lower",
        lambda f: f["taught"] < f["alone"],
    ),
    Claim(
        "on-policy",
        "On-policy: KL from the teacher on own texts, beside off-policy with reverse and with forward KL",
        lambda f: ", ".join(f"{f[f'own, {arm}']:.3f}" for arm in (ON, OFF, OFF_FORWARD)),
        "lower than both",
        lambda f: all(f[f"own, {ON}"] < f[f"own, {arm}"] for arm in (OFF, OFF_FORWARD)),
    ),
    Claim(
        "on-policy",
        "The same students: own texts without a wrong letter",
        lambda f: ", ".join(percent(f[f"legal, {arm}"]) for arm in (ON, OFF, OFF_FORWARD)),
        "more than both",
        lambda f: all(f[f"legal, {ON}"] > f[f"legal, {arm}"] for arm in (OFF, OFF_FORWARD)),
    ),
    Claim(
        "on-policy",
        "On-policy: KL on own texts, beside off-policy with new completions at every step (right texts of both)",
        lambda f: ", ".join(f"{f[f'own, {arm}']:.3f} ({percent(f[f'legal, {arm}'])})" for arm in (ON, OFF_NEW)),
        "lower",
        lambda f: f[f"own, {ON}"] < f[f"own, {OFF_NEW}"],
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiments", nargs="*", help=f"of {', '.join(EXPERIMENTS)}; left out: all")
    parser.add_argument("--seeds", nargs="+", type=int, choices=SEEDS, default=SEEDS)
    options = parser.parse_args()
    if unknown := [name for name in options.experiments if name not in EXPERIMENTS]:
        parser.error(f"no experiment is called {', '.join(unknown)}: there are {', '.join(EXPERIMENTS)}")
    torch.set_num_threads(1)
    for name in options.experiments or EXPERIMENTS:
        for seed in options.seeds:
            with tempfile.TemporaryDirectory(prefix="learning-") as folder:
                _add(name, seed, EXPERIMENTS[name].run(seed, Path(folder)))


def _add(name: str, seed: int, found: Found) -> None:
    """Put one seed on the page, beside what is there; several commands may do so at once."""
    results = BENCHMARKS / "training" / "results"
    with Path(__file__).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        raw = joined(raw_of(results / KIND) if (results / f"{KIND}.json").exists() else {}, name, seed, found)
        (results / f"{KIND}-{name}.svg").write_text(drawn(name, raw[name]))
        made = replace(
            Provenance.of_this_run(), command=f"python -m benchmarks.training.{KIND}"
        )  # whatever part it was
        write(page(raw), raw, made)


def joined(there: Raw, name: str, seed: int, found: Found) -> Raw:
    """Raw figures in which one seed of an experiment takes the place of an older run, in the order of the page."""
    ours = {**there.get(name, {}), str(seed): found.raw()}
    both = {**there, name: {str(one): ours[str(one)] for one in SEEDS if str(one) in ours}}
    return {one: both[one] for one in EXPERIMENTS if one in both}


def drawn(name: str, found: Mapping[str, Any]) -> str:
    """A panel for each seed."""
    shown = EXPERIMENTS[name]
    panels = {
        f"seed {seed}": {
            curve: [(x, y) for x, y in one["curves"][curve] if x or shown.has_start] for curve in shown.drawn
        }
        for seed, one in found.items()
    }
    return svg(panels, axes_for(panels, shown.x_title, shown.y_title))


PURPOSE = """Whether each way of training teaches what it is for. All runs are jobs of `tllm train` (of the `Job` that
its TOML file says, taken by a rank of it in this process, on one thread), small enough for minutes on a processor.
Seeds {seeds} were fixed before any of them was run; each draws texts, weights and order. Nothing is timed.

- Fine-tuning: the tiny model (2.0 M parameters) over 1,920 letters that it has never seen, whole and by a LoRA adapter
  of rank 64 (1.1 M parameters), each at the best that was tried for it with another seed; 64 letters are held out.
- Preferences: a Llama of two layers learns replies of both kinds alike, then 30 steps of DPO over 160 pairs; 100 are
  held out.
- Counting: GRPO from random weights, 100 steps of 80 completions: `3=` is answered by `aaa` and the end.
- Students: made-up languages of 15 letters; the teacher has 2.2 times the student's weights and learned 8,000 texts or
  more, the students {few}, from the same weights.
- On-policy and off-policy: students that go on from one student of these {few} texts, with the same prompts, teacher
  and number of tokens. Off-policy ones learn from the completions in the texts, one of them from
  new completions of the same prompts at every step, and the on-policy one from its own."""
MEANING = """Of {claims} claims {held} hold for every seed that is shown{missed}.

The on-policy student is judged by what it writes after 1,000 prompts that nobody learned. {on_policy}

{pictures}"""
LIMITS = """- Small models, tasks of letters: they show that the methods work here, not what they give a large one.
- On-policy distillation is at an advantage where texts are few, as here: the off-policy student reads {few} texts
  {times} times each. With new texts at every step it did not win ([log](../../../docs/log/training.md)).
- Equal tokens are not equal work: the on-policy student also samples its completions.
- GRPO's prompts are five, all of which are learned from.
- Rates and lengths of runs are those of the tests, or were chosen with other seeds than those shown, but for two of
  LoRA's: 240 steps, as with 120 its loss was 2.8 % above the whole model's for seed 1; and that its rate, rank and
  warmup were looked for at all, as with rank 32, twice the rate and a warmup of 5 steps it was 1.6, 2.6 and 2.1 %
  above."""


def page(raw: Mapping[str, Mapping[str, Any]]) -> Page:
    """The page of raw figures: by experiment and seed."""
    figures = {name: {int(seed): one["figures"] for seed, one in found.items()} for name, found in raw.items()}
    claims = [claim for claim in CLAIMS if claim.experiment in figures]
    rows = [["what", *(f"seed {seed}" for seed in SEEDS), "aim", "reached"]]
    for claim in claims:
        found = figures[claim.experiment]
        cells = (claim.shown(found[seed]) if seed in found else "not run" for seed in SEEDS)
        rows.append([claim.what, *cells, claim.aim, reached(claim, found)])
    missed = [claim.what for claim in claims if reached(claim, figures[claim.experiment]) != "yes"]
    meaning = MEANING.format(
        claims=len(claims),
        held=len(claims) - len(missed),
        missed=f"; not: {'; '.join(missed)}" if missed else "",
        on_policy=own_texts(figures["on-policy"]) if "on-policy" in figures else "It was not run.",
        pictures="\n\n".join(f"![Curves of {name}]({KIND}-{name}.svg)" for name in raw),
    )
    seeds = ", ".join(map(str, SEEDS))
    return Page(
        "training",
        KIND,
        "What small models learn",
        PURPOSE.format(seeds=seeds, few=FEW),
        markdown.table(rows),
        meaning,
        LIMITS.format(few=FEW, times=STEPS * BATCH // FEW),
    )


def reached(claim: Claim, found: Mapping[int, Figures]) -> str:
    """Whether a claim holds, "yes", "no", or for how many seeds."""
    held = sum(claim.holds(one) for one in found.values())
    return {0: "no", len(found): "yes"}.get(held, f"{held} of {len(found)}")


def own_texts(found: Mapping[int, Figures]) -> str:
    """How far the students of each seed are from the teacher, on their own texts and on those of the language."""

    def span(kind: str, arm: str) -> str:
        return _span([one[f"{kind}, {arm}"] for one in found.values()])

    times = [one[f"own, {OFF}"] / one[f"own, {ON}"] for one in found.values()]
    tokens = [one[f"tokens, {ON}"] / one[f"tokens, {OFF}"] for one in found.values()]
    right = [percent(pick(one["legal of the teacher"] for one in found.values())) for pick in (min, max)]
    return (
        f"Its divergence there is that of the off-policy student (reverse KL) divided by {_span(times)}, from "
        f"{_span(tokens)} times the tokens. On texts of the language that nobody learned it has {span('data', ON)} "
        f"nats a token, the off-policy student {span('data', OFF)}, with new completions {span('data', OFF_NEW)}. All "
        f"are far from done: of the teacher's own texts {right[0]} to {right[1]} have no wrong letter."
    )


def _span(values: list[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


if __name__ == "__main__":
    main()
