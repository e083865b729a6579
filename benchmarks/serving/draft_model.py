"""Drafts by a small model over slow links: `python -m benchmarks.serving.draft_model` (as root).

Two emulated machines share the tiny model as two pipeline stages. The same sampled replies, which repeat little of what
was said before, are generated without drafts, with drafts that are looked up, and with a draft model on the first
machine. Then the same in one process, where nothing is waited for.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.emulation.cluster_handle import ClusterHandle
from benchmarks.emulation.emulated_machines import ClusterShape, EmulatedMachines
from benchmarks.models.small_draft import TEACHER, save_small_draft
from benchmarks.report.markdown import table
from benchmarks.report.results import Page, write
from tests.support.cluster.hosts import why_not
from tllm.spec.plan import Plan
from tllm.spec.speculative_config import SpeculativeConfig

PLACES = {("pp=1", 0.0): (0,), ("pp=2", 0.0): (0, 1), ("pp=2", 5.0): (0, 1)}
"""Plan, and milliseconds one way of a link of 100 Mbit/s -> machines."""

PROMPT, REPLY, ASKED, ROUNDS, TEMPERATURE = 32, 96, 2, 2, 0.8
TOKENS = 6
WAYS = ("none", "looked up", "small model", "itself in int4")
"""Who drafts."""


def config_of(way: str, draft: Path) -> SpeculativeConfig | None:
    """What a way of drafting is, said to the engine."""
    ngram = SpeculativeConfig(num_speculative_tokens=TOKENS, method="ngram")
    small = SpeculativeConfig(num_speculative_tokens=TOKENS, model=str(draft.resolve()))
    itself = SpeculativeConfig(num_speculative_tokens=TOKENS, model=str(TEACHER), quantization="int4")
    return dict(zip(WAYS, (None, ngram, small, itself), strict=True))[way]


@dataclass
class Drafted:
    """One way of drafting for `at_once` requests: seconds of a token of all of them, and what drafts came to."""

    way: str
    at_once: int
    seconds: list[float] = field(default_factory=list)
    numbers: dict[str, float] = field(default_factory=dict)

    def row(self, where: str, plain: float) -> list[str]:
        seconds, numbers = statistics.median(self.seconds), self.numbers
        drafted = numbers.get("draft_tokens", 0.0)
        return [
            where,
            str(self.at_once),
            self.way,
            f"{1 / seconds:.1f}",
            f"{plain / seconds:.2f}",
            f"{100 * numbers['accepted_tokens'] / drafted:.0f} %" if drafted else "",
            f"{drafted / numbers['drafts']:.1f}" if drafted else "",
            f"{1e3 * numbers['draft_model_seconds'] / numbers['draft_model_steps']:.2f}"
            if numbers.get("draft_model_steps")
            else "",
        ]


def replies(where: tuple[str, float], folder: Path, draft: Path) -> list[Drafted]:
    """Every way in turn, round after round, over the machines of a plan."""
    delay_ms = where[1]
    found = [Drafted(way, at_once) for at_once in (1, 4) for way in WAYS]
    plan = Plan.parse(where[0], 6)
    with (
        EmulatedMachines(ClusterShape((0.8, 0.8), "100mbit", delay_ms)) as machines,
        ClusterHandle(machines, folder, "serve", TEACHER) as cluster,
    ):
        for _ in range(ROUNDS):
            for one in found:
                drafts = config_of(one.way, draft)
                more: dict[str, Any] = dict(at_once=one.at_once, temperature=TEMPERATURE)
                if drafts is not None:
                    more["draft"] = msgspec.json.encode(drafts).decode()
                turns = cluster.serve(plan, PLACES[where], PROMPT, REPLY, ASKED, TOKENS if drafts else 0, **more)
                one.seconds.append(statistics.fmean(turns) / ((REPLY - 1) * one.at_once))
                if one.way != "none":
                    one.numbers = cluster.numbers()
    return found


def main() -> None:
    if reason := why_not():
        sys.exit(reason)
    raw = defaultdict[str, list[dict[str, Any]]](list)
    with tempfile.TemporaryDirectory() as place:
        draft = Path(sys.argv[1]) if len(sys.argv) > 1 else save_small_draft(Path(place) / "draft")
        for number, where in enumerate(PLACES):
            folder = Path(place) / str(number)
            folder.mkdir()
            raw[name_of(where)] = [vars(one) for one in replies(where, folder, draft)]
            print(table([TITLES, *rows(raw)], left=3), flush=True)
    write(page(raw), dict(raw))


TITLES = ["where", "requests", "drafts", "tokens/s", "gain", "accepted", "checked a turn", "ms a draft step"]
PURPOSE = """What drafts by a small model gain where a link's delay takes most of a token's time, beside drafts that
are looked up, and where they gain nothing. The target is the trained model of this repository, 2 million parameters
and 6 layers in bfloat16, on one emulated machine or as two stages on two (benchmarks/emulation), joined by 100 Mbit/s.
The small model has one layer of width 96 and has learned the target's distribution for 800 steps
(benchmarks/models/small_draft.py). In its place the target also drafts for itself, in int4. Replies of 96 tokens to
meaningless prompts of 32, sampled at temperature 0.8, with up to 6 draft tokens a turn."""
READING = """`tokens/s`: of all requests together, the median of two rounds of two replies each, after a reply that
does not count. `gain`: over the same without drafts. `accepted`: of the drafted tokens that were checked. `checked a
turn`: draft tokens, of those turns that had any. `ms a draft step`: what one step of the draft model took. A draft
model is gone without in turns, at first half of the time; where it loses, it is tried in twelve turns of ever more."""
LIMITS = """- Text that repeats itself is looked up, and gains more (drafts.md).
- A draft model of 0.3 million parameters, two thirds of them its embedding, for one of 2 million: in real pairs the
  draft model is smaller beside the target, and right more often.
- Two rounds, on processors that other work shared."""


def page(raw: dict[str, list[dict[str, Any]]]) -> Page:
    title = "Serving: drafts by a small model"
    return Page("serving", "draft-model", title, PURPOSE, table([TITLES, *rows(raw)], left=3), READING, LIMITS)


def name_of(where: tuple[str, float]) -> str:
    plan, delay_ms = where
    return "one process" if plan == "pp=1" else f"{plan}, {delay_ms:g} ms"


def rows(raw: dict[str, list[dict[str, Any]]]) -> list[list[str]]:
    lines = []
    for where, runs in raw.items():
        found = [Drafted(**one) for one in runs]
        plain = {one.at_once: statistics.median(one.seconds) for one in found if one.way == "none"}
        lines += [one.row(where, plain[one.at_once]) for one in found]
    return lines


if __name__ == "__main__":
    main()
