"""Speculative decoding with drafted tokens over slow links: `python -m benchmarks.serving.drafts` (as root).

Two emulated machines share a model as two pipeline stages, or with tensor parallelism. The same greedy replies are
generated without drafts and with up to eight drafted tokens a step. The engine counts how many drafts were accepted;
with that share, and surveys of the machines before and after each run, the planner predicts the seconds of a token.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.emulation.cluster_handle import ClusterHandle
from benchmarks.emulation.emulated_machines import ClusterShape, EmulatedMachines
from benchmarks.models.random_llama import model_folder
from benchmarks.planner.plan_runs import BETWEEN, mean_of
from benchmarks.processes.python_module import ROOT
from benchmarks.report.markdown import percent, table
from benchmarks.report.results import Page, write
from tests.support.cluster.hosts import why_not
from tllm.cli.arguments.survey_settings import NODE_SECONDS, serving_settings
from tllm.planner.cost.serving_load import ServingFacts
from tllm.planner.measured.survey import Survey, cluster_of
from tllm.planner.simulate.serving import predict_serving
from tllm.spec.families import spec_from_config
from tllm.spec.hf_config import read_config
from tllm.spec.plan import Plan

LINKS = {("20mbit", 20.0): ("pp=2",), ("100mbit", 5.0): ("pp=2",), ("1gbit", 0.0): ("tp=2",)}
"""Rate and delay one way of each link, with the plans that make sense over it."""

DRAFTED = (0, 8)
PROMPT, REPLY, ASKED, ROUNDS = 64, 64, 3, 3


@dataclass
class Run:
    """A plan with up to `drafted` tokens a step: seconds of a token as predicted (`told`) and measured, round by round.

    `right`: the share of the drafted tokens that were accepted; `a_turn`: tokens that a step gave.
    """

    plan: str
    drafted: int
    told: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    right: float = 0.0
    a_turn: float = 1.0

    @property
    def error(self) -> float:
        return statistics.median(came / told - 1 for came, told in zip(self.seconds, self.told, strict=True))


def runs_on(machines: EmulatedMachines, folder: Path, model: Path) -> list[Run]:
    """Run every plan with and without drafts in turn, round after round, with a survey before and after each run."""
    spec = spec_from_config(read_config(model))
    facts = ServingFacts(spec.dtype, PROMPT, REPLY, num_speculative_tokens=max(DRAFTED))
    settings = serving_settings(facts, 2, NODE_SECONDS * 2)
    plans = LINKS[machines.shape.rate, machines.shape.delay_ms]
    found = [Run(plan, drafted) for plan in plans for drafted in DRAFTED]

    def foretell(run: Run, survey: Survey) -> float:
        of_run = replace(facts, num_speculative_tokens=run.drafted, acceptance=run.right)
        plan = Plan.parse(run.plan, spec.num_layers)
        return predict_serving(spec, plan, cluster_of(survey, spec), (0, 1), of_run).per_token

    with ClusterHandle(machines, folder, "serve", model) as cluster:
        before = cluster.measure(settings)
        brief = serving_settings(facts, 2, BETWEEN * NODE_SECONDS * 2)
        for _ in range(ROUNDS):
            for run in found:
                plan = Plan.parse(run.plan, spec.num_layers)
                replies = cluster.serve(plan, (0, 1), PROMPT, REPLY, ASKED, run.drafted)
                run.seconds.append(statistics.fmean(replies) / (REPLY - 1))
                if run.drafted:
                    count(run, cluster.numbers())
                after = cluster.measure(brief)
                run.told.append(foretell(run, mean_of([before, after])))
                before = after
    return found


def count(run: Run, numbers: dict[str, float]) -> None:
    """Take the accepted share and the tokens of a step from the engine's counters."""
    given = ASKED * (REPLY - 1)
    run.right = numbers["draft_right"] / (numbers["draft_right"] + numbers["draft_wrong"])
    run.a_turn = given / (given - numbers["accepted_tokens"])


def main() -> None:
    if reason := why_not():
        sys.exit(reason)
    raw = defaultdict[str, list[dict[str, Any]]](list)
    with tempfile.TemporaryDirectory() as place:
        models = {
            "random": model_folder("30m", Path(place), torch.float32),
            "tiny": ROOT / "models" / "tiny",
        }
        for name, model in models.items():
            for number, shape in enumerate(ClusterShape((0.8, 0.8), *link) for link in LINKS):
                folder = Path(place) / f"{name}-{number}"
                folder.mkdir()
                with EmulatedMachines(shape) as machines:
                    found = runs_on(machines, folder, model)
                raw[f"{name} {shape}"] = [vars(run) for run in found]
                print(table([TITLES, *rows(f"{name} {shape}", found)], left=2), flush=True)
    write(page(raw), dict(raw))


TITLES = ["model and cluster", "plan", "drafted", "ms/token", "gain", "accepted", "tokens a step", "predicted", "error"]
PURPOSE = """What drafted tokens gain where a link's delay takes most of a token's time, and whether the planner
predicts it. `random`: 30 million parameters in float32, never trained, whose text soon repeats one token. `tiny`: the
trained model of this repository, 2 million parameters in bfloat16, which writes prose and Python. Greedy replies of 64
tokens to meaningless prompts of 64, on two emulated machines (benchmarks/emulation), with up to 8 tokens drafted a
step."""
READING = """`gain`: how many times as fast as the same plan without drafts. `accepted`: the share of the drafted tokens
that were right. `predicted` and `error`: the planner's ms/token from surveys before and after a run, and how far the
measurement was above it; of the run in the middle of three. Predictions were off by {mean} on average over {count}
plans, {worst} at worst. The tests hold that the tokens are those without drafts."""
LIMITS = """- Drafts are looked up in the text so far; there is no draft model. Text that repeats nothing gains nothing.
- `random` is the best case, a text of one repeated token; `tiny` is nearer to real text.
- Small models only; the larger the model, the less a link's delay weighs and the less drafts gain."""


def page(raw: Mapping[str, list[dict[str, Any]]]) -> Page:
    """The page of raw figures: the runs of each model on each cluster."""
    found = {name: [Run(**one) for one in runs] for name, runs in raw.items()}
    errors = [abs(run.error) for runs in found.values() for run in runs]
    lines = [TITLES, *(row for name, runs in found.items() for row in rows(name, runs))]
    numbers = dict(mean=percent(statistics.fmean(errors)), count=len(errors), worst=percent(max(errors)))
    title = "Serving: drafted tokens over slow links"
    return Page("serving", "drafts", title, PURPOSE, table(lines, left=2), READING.format(**numbers), LIMITS)


def rows(name: str, found: list[Run]) -> list[list[str]]:
    plain = {run.plan: statistics.median(run.seconds) for run in found if not run.drafted}
    lines = []
    for run in found:
        seconds, told = statistics.median(run.seconds), statistics.median(run.told)
        lines.append(
            [name, run.plan, str(run.drafted), f"{1e3 * seconds:.1f}", f"{plain[run.plan] / seconds:.2f}"]
            + ([f"{100 * run.right:.0f} %", f"{run.a_turn:.2f}"] if run.drafted else ["", ""])
            + [f"{1e3 * told:.1f}", percent(run.error, sign=True)]
        )
    return lines


if __name__ == "__main__":
    main()
