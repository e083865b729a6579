"""What the page of learning says of made-up figures, how its axes are found, and the judge of students."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.report.curves import axes_for, svg
from benchmarks.report.results import PAGE_LINES, Page, Provenance
from benchmarks.training.experiments import learning
from benchmarks.training.experiments.runs import Found, sampled, seeded
from benchmarks.training.experiments.students import ARMS, END_ID, OFF_FORWARD, ON, Judge
from tests.support.training.post_training.letter_languages import (
    PROMPT,
    REPLY,
    STUDENT,
    TEACHER,
    ids_of,
    is_of,
    language_job,
    of_two_letters,
    opened,
    write_shape,
    write_texts,
)
from tests.support.training.post_training.policy_task import CHARACTERS
from tests.support.training.post_training.tastes import is_wanted
from tests.support.training.runs import train

GOOD: dict[str, dict[str, float]] = {
    "fine-tuning": {"before": 2.0, "whole": 1.0, "adapter": 1.019},
    "preferences": {"margin before": 0.0, "margin": 0.5, "pairs won": 0.95, "wanted before": 0.5, "wanted": 0.9},
    "counting": {"before": 0.19, "after": 0.81},
    "taught": {"teacher": 1.0, "alone": 2.0, "taught": 1.1},
    "on-policy": {
        **{f"own, {arm}": 0.4 for arm in ARMS},
        **{f"data, {arm}": 0.4 for arm in ARMS},
        **{f"legal, {arm}": 0.3 for arm in ARMS},
        **{f"tokens, {arm}": 100.0 for arm in ARMS},
        f"own, {ON}": 0.2,
        f"legal, {ON}": 0.5,
        "legal of the teacher": 0.79,
    },
}
BAD = {
    "fine-tuning": {"adapter": 1.021},
    "preferences": {"pairs won": 0.9},
    "counting": {"before": 0.2},
    "taught": {"alone": 1.1},
    "on-policy": {f"own, {OFF_FORWARD}": 0.2},
}


def raw_of(change: dict[str, dict[str, float]], seed: int = 2) -> dict[str, dict[str, Any]]:
    """Of each experiment three seeds that reach all aims, but one of them with a change."""
    return {
        name: {
            str(one): {"figures": {**figures, **(change.get(name, {}) if one == seed else {})}, "curves": {}}
            for one in learning.SEEDS
        }
        for name, figures in GOOD.items()
    }


def reached(page: Page) -> list[str]:
    return [line.split("|")[-2].strip() for line in page.table.splitlines()[2:]]


def test_a_page_says_what_holds_for_every_seed() -> None:
    page = learning.page(raw_of({}))
    assert reached(page) == ["yes"] * len(learning.CLAIMS)
    assert "Of 10 claims 10 hold for every seed that is shown." in page.meaning
    said = " ".join(page.meaning.split())
    assert "(reverse KL) divided by 2.00 to 2.00, from 1.00 to 1.00 times the tokens" in said
    assert "with new completions 0.40 to 0.40" in said and "79.0 % to 79.0 % have no wrong letter" in said
    text = page.text(
        Provenance("2026-11-28", "abc1234", "Some CPU", "python -m benchmarks.training.experiments.learning")
    )
    assert len(text.splitlines()) <= PAGE_LINES


@pytest.mark.parametrize("name", BAD)
def test_one_seed_that_misses_an_aim_is_told(name: str) -> None:
    page = learning.page(raw_of({name: BAD[name]}))
    assert sorted(reached(page)) == sorted(["2 of 3"] + ["yes"] * (len(learning.CLAIMS) - 1))
    assert "Of 10 claims 9 hold for every seed that is shown; not: " in page.meaning


def test_a_seed_takes_the_place_of_its_older_run_and_no_other() -> None:
    found = Found({"before": 0.1, "after": 0.5}, {"right": [(5.0, 0.1)]})
    raw = learning.joined(learning.joined({}, "taught", 1, found), "counting", 3, found)
    raw = learning.joined(learning.joined(raw, "counting", 1, found), "counting", 3, Found({"after": 0.9}, {}))
    assert [(name, list(seeds)) for name, seeds in raw.items()] == [("counting", ["1", "3"]), ("taught", ["1"])]
    assert raw["counting"]["3"] == {"figures": {"after": 0.9}, "curves": {}}
    assert raw["counting"]["1"] == {"figures": {"before": 0.1, "after": 0.5}, "curves": {"right": [(5.0, 0.1)]}}
    of_one = {"counting": {"1": raw_of({})["counting"]["1"]}}
    assert "| 19.0 % to 81.0 % | not run | not run |" in learning.page(of_one).table


def test_axes_hold_all_that_is_drawn_at_round_values() -> None:
    panels = {"a": {"x": [(0.0, 0.31), (120.0, 2.9)]}, "b": {"x": [(0.0, -0.07), (70.0, 1.0)]}}
    axes = axes_for(panels, "steps", "loss")
    assert axes.x_range == (0.0, 120.0) and list(axes.x_ticks.values()) == ["0", "20", "40", "60", "80", "100", "120"]
    assert axes.y_range == (-0.5, 2.9) and list(axes.y_ticks.values()) == ["-0.5", *(f"{n / 2:.1f}" for n in range(6))]
    drawn = ElementTree.fromstring(svg(panels, axes))
    assert len([one for one in drawn if one.tag.endswith("polyline")]) == 2
    small = axes_for({"a": {"x": [(0.0, 0.0), (3.0, 0.09)]}}, "", "")
    assert small.y_range == (0.0, 0.09) and list(small.y_ticks.values()) == ["0.00", "0.02", "0.04", "0.06", "0.08"]


def test_a_reply_is_wanted_that_has_more_wanted_words_than_unwanted() -> None:
    assert is_wanted([0, 19, 98, 40, 100]) and not is_wanted([0, 60, 100]) and not is_wanted([20, 59])


def test_a_text_is_of_its_language_when_it_is_whole_and_each_letter_may_follow() -> None:
    language = of_two_letters(1)
    text = "01"
    while len(text) < PROMPT + REPLY:
        text += language[text[-2], text[-1]][0][1]
    assert is_of(language, text) and not is_of(language, text[:-1])
    wrong = next(letter for letter in CHARACTERS if letter not in language[text[-3], text[-2]][0])
    assert not is_of(language, text[:-1] + wrong)


def test_the_judge_says_how_far_a_student_is_from_its_teacher_where_it_goes_itself(tmp_path: Path) -> None:
    """Against a loop over single tokens, with a student that often ends early."""
    language = of_two_letters(1)
    rows = write_texts(tmp_path / "rows.jsonl", language, 12, 1)
    models = []
    for width in (TEACHER, STUDENT):
        shape = write_shape(tmp_path / f"shape-{width}", width)
        train(language_job(shape, tmp_path / f"{width}", rows, 1, warmup_steps=0), "pp=1")
        models.append(opened(tmp_path / f"{width}" / "final"))
    teacher, student = models
    texts_BT = ids_of(tmp_path / f"shape-{STUDENT}", rows)
    assert Judge(teacher, texts_BT, language, 7).of(teacher)[:2] == (0.0, 0.0)
    found = Judge(teacher, texts_BT, language, 7).of(student)
    with seeded(7):
        replies_BT = sampled(student, texts_BT[:, :PROMPT], REPLY, END_ID)
    assert (replies_BT == END_ID).any() and replies_BT.shape == (12, REPLY)
    each = []
    for prompt_T, reply_T in zip(texts_BT[:, :PROMPT].tolist(), replies_BT.tolist(), strict=True):
        for place in range(reply_T.index(END_ID) + 1 if END_ID in reply_T else REPLY):
            ids = torch.tensor([prompt_T + reply_T[:place]])
            with torch.no_grad():
                mine_V, theirs_V = (model(ids).logits[0, -1].softmax(-1) for model in (student, teacher))
            each.append(sum(p * math.log(p / q) for p, q in zip(mine_V.tolist(), theirs_V.tolist(), strict=True)))
    assert found.own == pytest.approx(sum(each) / len(each), rel=1e-4)
    assert found.data != found.own and found.legal == 0
    assert Judge(teacher, texts_BT, language, 7).of(student) == found, "the same seed, the same texts"
