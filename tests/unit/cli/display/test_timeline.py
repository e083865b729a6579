"""Pictures of timelines: each box where its time is, grey where a line waits, and the same in letters."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from tllm.cli.display.tables import brief
from tllm.cli.display.timeline import COLOURS, LEFT, MOST, WIDTH, as_svg, as_text, save_svg
from tllm.core.errors import ConfigError
from tllm.planner.simulate.explain import StageTimeline, TimelineBar
from tllm.planner.simulate.pipeline import SchedulePlayer, StageWork
from tllm.spec.pipeline_schedule import build
from tllm.spec.plan import Plan

TIMELINE = SchedulePlayer(build("zero_bubble", 3, 4)).play(StageWork(1, 1, 1))
LINES = [
    StageTimeline(
        f"stage {number} & more", tuple(TimelineBar(one.start, one.stop, str(one.op), one.op.kind) for one in spans)
    )
    for number, spans in enumerate(TIMELINE.spans)
]


def test_boxes_lie_where_their_time_is() -> None:
    root = ElementTree.fromstring(as_svg(LINES, "a <title>"))
    boxes = [one for one in root if one.tag.endswith("rect") and len(one)]
    assert len(boxes) == sum(len(line.bars) for line in LINES)
    bars = [bar for line in LINES for bar in line.bars]
    for box, bar in zip(boxes, bars, strict=True):
        x, width = float(box.attrib["x"]), float(box.attrib["width"])
        assert x == pytest.approx(LEFT + WIDTH * bar.start / TIMELINE.total, abs=0.01)
        assert x + width <= LEFT + WIDTH + 0.02
        assert box.attrib["fill"] == COLOURS[bar.kind]
        assert (box[0].text or "").startswith(f"{bar.text}: ")
    rows = {box.attrib["y"] for box in boxes}
    grey = [one for one in root if one.attrib.get("fill") == "#eee" and one.attrib["width"] == str(WIDTH)]
    assert {one.attrib["y"] for one in grey} == rows


def test_colours_are_told_and_a_long_title_is_cut() -> None:
    text = as_svg(LINES, "x" * 1000)
    words = "".join(ElementTree.fromstring(text).itertext())
    for name in ("forward", "backward", "gradients of weights", "waiting", "0 ms"):
        assert name in words
    assert "sums" not in words and "x" * (MOST + 1) not in words
    assert ElementTree.fromstring(as_svg([], "nothing")) is not None


def test_letters_say_what_takes_longest() -> None:
    row = as_text(
        [StageTimeline("a", (TimelineBar(0, 6, "F0", "forward"), TimelineBar(8, 10, "sums", "sums")))], width=10
    ).splitlines()
    assert row == ["a |FFFFFF..SS|", "   0 1e+04 ms"]


@pytest.mark.parametrize(
    ("text", "layers", "short"),
    [
        ("pp=4,layers=1+2+2+2", 7, "layers=1+2*3"),
        ("pp=8,tp=2,chunks=4,layers=1+2*30+1", 62, "pp=8,tp=2*8,layers=1+2*30+1"),
        ("pp=2,tp=1+2,dp=2", 9, "pp=2,tp=1+2,layers=4+5"),
    ],
)
def test_a_plan_in_brief_is_the_same_plan(text: str, layers: int, short: str) -> None:
    plan = Plan.parse(text, layers)
    assert short in brief(plan)
    assert Plan.parse(brief(plan), layers) == plan


def test_a_picture_that_cannot_be_written_is_no_fault_of_ours(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot write .*: Is a directory"):
        save_svg(tmp_path, LINES, "a title")
