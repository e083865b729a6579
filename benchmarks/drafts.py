"""Tokens drafted over slow links, predicted and measured: `python benchmarks/drafts.py` (as root).

Two machines made here share a model as two stages, or as ranks of one. The same greedy replies are given without drafts
and with up to eight drafted tokens a turn. What was right of the drafts is counted, and with it the planner is asked
what a token takes, from surveys before and after each run.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from ordered import Ordered
from report import write
from shapes import model_folder
from throttled import Machines, Shape

sys.path.append(str(Path(__file__).parents[1]))
from planning_runs import BETWEEN, mean_of

from tests.support.hosts import why_not
from tllm.cli.display.tables import table
from tllm.cli.survey_settings import NODE_SECONDS, serving_settings
from tllm.planner.cost.serving_load import ServingFacts
from tllm.planner.measured.survey import Survey, cluster_of
from tllm.planner.simulate.serving import predict_serving
from tllm.spec.families import spec_from_config
from tllm.spec.hf_config import read_config
from tllm.spec.plan import Plan

LINKS = {("20mbit", 20.0): ("pp=2",), ("100mbit", 5.0): ("pp=2",), ("1gbit", 0.0): ("tp=2",)}
"""With the plans that make sense over each."""

DRAFTED = (0, 8)
PROMPT, REPLY, ASKED, ROUNDS = 64, 64, 3, 3

HOW = """
`random`: 30 million parameters in float32 that were never trained, whose text soon repeats one token; `tiny`: the
trained model of this repository, 2 million parameters in bfloat16, which writes prose and Python. Greedy, prompts of 64
tokens that mean nothing, replies of as many. Machines and links are those of benchmarks/planning.py; `right` is the
part of what could be drafted that came so, counted by the engine in these replies, and `a turn` the tokens that a turn
gave. The error is that of the run in the middle of three. That ids are those without drafts is held by the tests."""


@dataclass
class Run:
    """A plan with up to so many drafted tokens: seconds of a token, told and measured, round by round."""

    plan: str
    drafted: int
    told: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    right: float = 0.0
    a_turn: float = 1.0

    @property
    def error(self) -> float:
        return statistics.median(came / told - 1 for came, told in zip(self.seconds, self.told, strict=True))


def runs_on(machines: Machines, folder: Path, model: Path) -> list[Run]:
    """Every plan with and without drafts, in turn, round after round; a survey before and after each."""
    spec = spec_from_config(read_config(model))
    facts = ServingFacts(spec.dtype, PROMPT, REPLY, num_speculative_tokens=max(DRAFTED))
    settings = serving_settings(facts, 2, NODE_SECONDS * 2)
    plans = LINKS[machines.shape.rate, machines.shape.delay_ms]
    found = [Run(plan, drafted) for plan in plans for drafted in DRAFTED]

    def foretell(run: Run, survey: Survey) -> float:
        of_run = replace(facts, num_speculative_tokens=run.drafted, acceptance=run.right)
        plan = Plan.parse(run.plan, spec.num_layers)
        return predict_serving(spec, plan, cluster_of(survey, spec), (0, 1), of_run).per_token

    with Ordered(machines, folder, "serve", model) as cluster:
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
    """What the engine says of its drafts."""
    given = ASKED * (REPLY - 1)
    run.right = numbers["draft_right"] / (numbers["draft_right"] + numbers["draft_wrong"])
    run.a_turn = given / (given - numbers["accepted_tokens"])


def main() -> None:
    if reason := why_not():
        sys.exit(reason)
    raw = defaultdict[str, list[dict[str, Any]]](list)
    lines = [["model", "cluster", "plan", "drafted", "ms/token", "gain", "right", "a turn", "predicted", "error"]]
    with tempfile.TemporaryDirectory() as place:
        models = {
            "random": model_folder("30m", Path(place), torch.float32),
            "tiny": Path(__file__).parents[1] / "models" / "tiny",
        }
        for name, model in models.items():
            for number, shape in enumerate(Shape((0.8, 0.8), *link) for link in LINKS):
                folder = Path(place) / f"{name}-{number}"
                folder.mkdir()
                with Machines(shape) as machines:
                    found = runs_on(machines, folder, model)
                raw[f"{name} {shape}"] = [vars(run) for run in found]
                lines += rows(name, shape, found)
                print(table(lines[:1] + lines[-len(found) :]), flush=True)
    errors = [abs(run.error) for runs in raw.values() for run in (Run(**one) for one in runs)]
    notes = f"Predictions were off by {100 * statistics.fmean(errors):.1f} % on an average of {len(errors)}, "
    notes += f"{100 * max(errors):.1f} % at worst.\n{HOW}"
    write("drafts", "Drafted tokens, predicted and measured", f"```\n{table(lines)}\n```", dict(raw), notes)


def rows(name: str, shape: Shape, found: list[Run]) -> list[list[str]]:
    plain = {run.plan: statistics.median(run.seconds) for run in found if not run.drafted}
    lines = []
    for run in found:
        seconds, told = statistics.median(run.seconds), statistics.median(run.told)
        lines.append(
            [name, str(shape), run.plan, str(run.drafted), f"{1e3 * seconds:.1f}", f"{plain[run.plan] / seconds:.2f}"]
            + ([f"{100 * run.right:.0f} %", f"{run.a_turn:.2f}"] if run.drafted else ["", ""])
            + [f"{1e3 * told:.1f}", f"{100 * run.error:+.1f} %"]
        )
    return lines


if __name__ == "__main__":
    main()
