"""What of a row held out the model is asked to go on from, whichever form the row is in."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.support.training.post_training.policy_task import write_task
from tllm.core.errors import ConfigError
from tllm.text.tokenizer import Tokenizer
from tllm.training.data.batches import Batches, DataConfig
from tllm.training.data.encoder import IGNORED, Document
from tllm.training.policy.held_out_completions import prompt_of, prompts_of, tokenizer_in

__ = IGNORED


def document(ids: Sequence[int], targets: Sequence[int], parts: tuple[int, ...] = ()) -> Document:
    return Document(np.array(ids, dtype=np.int32), np.array(targets, dtype=np.int32), parts)


@pytest.mark.parametrize(
    ("row", "room", "prompt", "reference"),
    [
        (document([1, 2, 3, 4], [__, 3, 4, __]), 8, (1, 2), (3, 4)),
        (document([1, 2, 3, 4, 5, 6, 7], [__, 3, __, __, 6, 7, __]), 8, (1, 2), (3,)),  # the first of two replies
        (document([1, 2, 3, 4, 5], [2, 3, 4, 5, __]), 8, (1, 2), (3, 4, 5)),  # a text: its first half
        (document([1, 2, 3, 4, 5, 6, 7, 8], [2, 3, 4, 5, 6, 7, 8, __]), 2, (1, 2), (3, 4, 5, 6, 7, 8)),
        (document([1, 2, 3, 1, 2, 9, 9], [__, 3, __, __, 9, 9, __], (3, 4)), 8, (1, 2), (3,)),  # the chosen of a pair
        (document([1, 2], [2, __]), 1, (1,), (2,)),
    ],
)
def test_a_prompt_is_what_stands_before_the_first_reply(
    row: Document, room: int, prompt: tuple[int, ...], reference: tuple[int, ...]
) -> None:
    assert prompt_of(row, room) == (prompt, reference)


@pytest.mark.parametrize(
    "row",
    [
        document([1], [__]),
        document([1, 2, 3], [__, __, __]),
        document([1, 2, 3, 4], [__, __, __, 5]),  # four tokens before the reply, and room for three
        document([1, 2, 3, 4, 5], [__, __, __, 5, __], (2, 3)),  # the first part says nothing
    ],
)
def test_a_row_without_a_reply_or_with_a_long_prompt_is_passed_over(row: Document) -> None:
    assert prompt_of(row, 3) is None


def test_rows_are_taken_in_their_order(tmp_path: Path) -> None:
    write_task(tmp_path)
    rows = tmp_path / "held_out.jsonl"
    rows.write_text('{"prompt": "12345=", "completion": "a"}\n{"text": "aabb"}\n{"prompt": "2=", "completion": "aa"}\n')
    tokenizer = Tokenizer.from_folder(tmp_path)
    batches = Batches(DataConfig((str(rows),), 16, 1, shuffle=False, epochs=1), tokenizer)
    assert tokenizer is not None
    found = [tuple(tokenizer.decode(ids) for ids in prompt) for prompt in prompts_of(batches, 4)]
    assert found == [("aa", "bb<end>"), ("2=", "aa<end>")]
    batches.close()


def test_what_is_to_be_read_needs_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json and eval_num_prompts asks for completions"):
        tokenizer_in(tmp_path)
