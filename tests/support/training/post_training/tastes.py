"""A taste that a model can learn from pairs: words of low numbers are wanted, words of high ones are not."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

WANTED, UNWANTED = (0, 20), (60, 99)
"""Words whose numbers lie in the one half-open range are wanted, in the other not; nobody minds those between."""

LIKELY, REPLY, PROMPT = 0.7, 5, 3
"""How often a word of a reply is of its kind and not any word; words of a reply and of a prompt."""


def reply(dice: random.Random, wanted: bool) -> str:
    """Random words, most of them of one kind."""
    kind = WANTED if wanted else UNWANTED
    return "".join(f" w{dice.randrange(*kind) if dice.random() < LIKELY else dice.randrange(99)}" for _ in range(REPLY))


def prompt(dice: random.Random) -> str:
    return " ".join(f"w{dice.randrange(99)}" for _ in range(PROMPT))


def write_tasteful_rows(path: Path, count: int, seed: int, paired: bool) -> Path:
    """Pairs of a wanted and an unwanted reply to the same prompt, or single replies with a label."""
    dice = random.Random(seed)
    rows = []
    for _ in range(count):
        asked = prompt(dice)
        label = dice.random() < 0.5
        both = {"chosen": reply(dice, True), "rejected": reply(dice, False)}
        rows.append({"prompt": asked, **(both if paired else {"completion": reply(dice, label), "label": label})})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def is_wanted(words: Sequence[int]) -> bool:
    """Whether a reply, as the numbers of its words, has more wanted words than unwanted ones."""
    wanted, unwanted = (sum(word in range(*kind) for word in words) for kind in (WANTED, UNWANTED))
    return wanted > unwanted
