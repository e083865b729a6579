"""Coverage: holes, overlaps and strangers are named by tensor, range and rank."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from tllm.core.errors import PlanError
from tllm.weights.coverage import HeldBlock, check_coverage

SHAPES = {"w": (8, 4), "norm": (4,)}


def rows(start: int, stop: int, replicated: bool = False) -> HeldBlock:
    return HeldBlock("w", ((start, stop), (0, 4)), replicated)


def columns(start: int, stop: int) -> HeldBlock:
    return HeldBlock("w", ((0, 8), (start, stop)))


NORM = HeldBlock("norm", (), True)


def test_whole_models() -> None:
    check_coverage({0: [HeldBlock("w"), HeldBlock("norm")]}, SHAPES)
    check_coverage({0: [rows(0, 3), NORM], 1: [rows(3, 8), NORM]}, SHAPES)
    check_coverage({0: [columns(0, 1), NORM], 1: [columns(3, 4)], 2: [columns(1, 3)]}, SHAPES)
    check_coverage({0: [rows(0, 5, True), NORM], 1: [rows(3, 8, True)]}, SHAPES)
    check_coverage(
        {0: [HeldBlock("w", ((0, 4), (0, 2))), NORM], 1: [HeldBlock("w", ((0, 4), (2, 4))), rows(4, 8)]}, SHAPES
    )


@pytest.mark.parametrize(
    ("held", "match"),
    [
        ({0: [rows(0, 3)], 1: [rows(4, 8)]}, r"w\[3:4, 0:4\] of shape \(8, 4\) is held by no rank"),
        ({0: [rows(0, 7)]}, r"w\[7:8, 0:4\].*no rank"),
        ({0: [columns(0, 2)], 1: [columns(3, 4)]}, r"w\[0:8, 2:3\].*no rank"),
        ({0: []}, r"w\[0:8, 0:4\].*no rank"),
        ({0: [rows(0, 5)], 3: [rows(4, 8)]}, r"w\[4:5, 0:4\].*ranks 0 and 3.*rank 0 holds it as its alone"),
        ({0: [rows(0, 5, True)], 3: [rows(4, 8)]}, r"ranks 0 and 3.*rank 3 holds it as its alone"),
        ({0: [rows(0, 8), rows(2, 3)]}, r"ranks 0 and 0"),
        ({0: [rows(0, 9)]}, r"rank 0 holds w\[0:9, 0:4\].*not inside"),
        ({0: [HeldBlock("w", ((0, 8),))]}, r"not inside its shape"),
        ({0: [HeldBlock("w"), HeldBlock("v")]}, r"'v' is in the plan and not in the weight files"),
    ],
)
def test_faults(held: dict[int, list[HeldBlock]], match: str) -> None:
    with pytest.raises(PlanError, match=match):
        check_coverage({9: [NORM]} | held, SHAPES)


def test_needed_names() -> None:
    check_coverage({0: [HeldBlock("w")]}, SHAPES | {"inv_freq": (2,)}, needed=["w"])
    with pytest.raises(PlanError, match=r"inv_freq\[0:2\]"):
        check_coverage({0: [HeldBlock("w")]}, {"w": (8, 4), "inv_freq": (2,)})
    with pytest.raises(PlanError, match="'bias' is in the plan"):
        check_coverage({0: [HeldBlock("w")]}, SHAPES, needed=["w", "bias"])


def test_tensors_without_elements_or_dims() -> None:
    check_coverage({0: [HeldBlock("scalar")]}, {"scalar": (), "none": (0, 4)})
    with pytest.raises(PlanError, match="scalar"):
        check_coverage({0: []}, {"scalar": ()})


def test_many_tensors_cut_many_ways_are_quick() -> None:
    shapes = {f"w{i}": (64, 4096) for i in range(5000)}
    held = {
        rank: [HeldBlock(f"w{i}", ((0, 64), (rank * 512, rank * 512 + 512))) for i in range(5000)] for rank in range(8)
    }
    began = time.thread_time()
    check_coverage(held, shapes)
    assert time.thread_time() - began < 10, "40,000 pieces take a fraction of a second where nothing is quadratic"


def test_it_loads_no_torch() -> None:
    program = "import sys, tllm.weights.coverage, tllm.weights.manifest; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], env={"PYTHONPATH": "src"}, check=False).returncode == 0
