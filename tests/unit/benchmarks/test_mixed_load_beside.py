"""Which replies are in time, and what the page of two servers under the same mixed load says."""

from __future__ import annotations

from typing import Any

from benchmarks.faults.mixed_clients import FIRST_SECONDS, NEXT_SECONDS, Seen
from benchmarks.faults.mixed_load_beside import page


def test_a_reply_is_in_time_by_its_first_token_and_by_its_end() -> None:
    seen = Seen()
    seen.add(FIRST_SECONDS + 10 * NEXT_SECONDS, 10, first=FIRST_SECONDS)
    seen.add(FIRST_SECONDS + 10 * NEXT_SECONDS + 0.1, 10, first=FIRST_SECONDS)
    seen.add(FIRST_SECONDS + 0.2, 10, first=FIRST_SECONDS + 0.1)
    seen.add(FIRST_SECONDS, 1)  # in one piece
    assert (seen.done, seen.in_time, seen.tokens) == (4, 2, 31)
    figures = seen.figures()
    assert figures["first_s"] == [FIRST_SECONDS, FIRST_SECONDS + 0.1, FIRST_SECONDS + 0.1]
    assert figures["next_s"][0] == round(10 * NEXT_SECONDS / 9, 4) and len(figures["whole_s"]) == 3


def test_the_page_divides_what_both_gave_and_tells_what_was_wrong() -> None:
    def figures(in_time: int, faults: dict[str, int]) -> dict[str, Any]:
        chat = {"done": 50, "in_time": in_time, "tokens": 1000, "first_s": [0.1, 0.2, 0.3], "next_s": [], "whole_s": []}
        refused = {"done": 9, "in_time": 9, "tokens": 0, "first_s": [], "next_s": [], "whole_s": []}
        return {"seconds": 10.0, "mib": 100.0, "seen": {"chat": chat, "refused": refused}, "faults": faults}

    wrong = {"refused: RuntimeError: n: 0 was answered 200 and not refused": 3}
    made = page({"kernels": "avx2", "tllm": figures(40, {}), "llama.cpp": figures(20, wrong)})
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in made.table.splitlines()]
    assert ["tllm", "4.00", "100.0", "100"] in lines and ["llama.cpp", "2.00", "100.0", "100"] in lines
    assert ["chat", "tllm", "50", "40", "0", "100 / 200 / 300", ""] in lines
    assert ["refused", "llama.cpp", "9", "9", "3", "", ""] in lines
    assert "2.00 times the replies in time, and 1.00 times the tokens" in made.meaning
    assert "llama.cpp: 3 times refused: RuntimeError: n: 0 was answered 200" in made.limits
    assert "tllm: " not in made.limits
