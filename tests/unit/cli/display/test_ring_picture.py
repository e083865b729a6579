from __future__ import annotations

from tllm.cli.display.ring_picture import ring
from tllm.spec.plan import Plan


def test_a_ring_of_two_stages() -> None:
    assert ring(Plan.parse("pp=2,tp=1+2", 6)) == (
        "stage 0: layers [0, 3) ── hidden state ─▶ stage 1: layers [3, 6)\n"
        "rank 0                                    rank 1 ⇄ rank 2\n"
        "▲" + "─" * 25 + " token ids " + "─" * 26 + "┘"
    )


def test_one_stage_is_no_ring() -> None:
    assert ring(Plan.parse("tp=2", 6)) == "stage 0: layers [0, 6)\nrank 0 ⇄ rank 1"
