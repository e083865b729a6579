"""Prompts as text and as messages, the columns beside them, and the place in them that a save keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.training.post_training.policy_task import write_task
from tllm.core.errors import ConfigError
from tllm.text.chat_template import ChatTemplate
from tllm.text.tokenizer import Tokenizer
from tllm.training.data.batches import DataConfig
from tllm.training.data.encoder import IGNORED, Encoder
from tllm.training.data.prompt_batches import PromptBatches, PromptEncoder, RepliedPromptEncoder

TEMPLATE = "{% for m in messages %}({{ m['content'] }}){% endfor %}{% if add_generation_prompt %}={% endif %}"


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    write_task(tmp_path)
    found = Tokenizer.from_folder(tmp_path)
    assert found is not None
    return found


def batches(folder: Path, tokenizer: Tokenizer, rows: list[dict[str, Any]], steps_each: int = 1) -> PromptBatches:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig((str(file),), seq_len=20, global_batch_size=2, shuffle=False)
    return PromptBatches(config, PromptEncoder(tokenizer, ChatTemplate(TEMPLATE), 6), steps_each)


def test_a_prompt_is_text_or_messages_and_keeps_its_columns(tmp_path: Path, tokenizer: Tokenizer) -> None:
    talk = [{"role": "user", "content": "7"}]
    rows = [{"prompt": "12=", "answer": 12}, {"prompt": talk, "answer": 7}]
    one, other = batches(tmp_path, tokenizer, rows).prompts(0)
    assert tokenizer.decode(one.ids) == "12=" and one.columns == rows[0]
    assert tokenizer.decode(other.ids) == "(7)=" and other.columns == rows[1]


def test_a_prompt_of_a_token_that_the_model_has_not_is_refused(tokenizer: Tokenizer) -> None:
    most = max(tokenizer.encode("12="))
    assert PromptEncoder(tokenizer, None, 6, vocab_size=most + 1).encode({"prompt": "12="}).ids.max() == most
    with pytest.raises(ConfigError, match=rf"the row holds {most} and the vocabulary is \[0, {most}\)"):
        PromptEncoder(tokenizer, None, 6, vocab_size=most).encode({"prompt": "12="})


def test_an_instruction_is_a_prompt_without_its_output(tmp_path: Path, tokenizer: Tokenizer) -> None:
    row = {"instruction": "1", "input": "", "output": "a"}
    (one,) = batches(tmp_path, tokenizer, [row]).prompts(0)[:1]
    assert tokenizer.decode(one.ids) == "(1)="
    assert one.columns == {**row, "prompt": [{"role": "user", "content": "1"}]}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"text": "1="}, "no prompt"),
        ({"prompt": 3}, "no prompt"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": "1234567"}, "the prompt has 7 tokens.* leaves 6"),
    ],
)
def test_a_row_that_is_no_prompt_is_named(
    row: dict[str, Any], words: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    with pytest.raises(ConfigError, match=rf"rows\.jsonl, line 2: .*{words}"):
        batches(tmp_path, tokenizer, [{"prompt": "1="}, row]).prompts(0)


def test_messages_need_a_template(tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="has no chat template"):
        PromptEncoder(tokenizer, None, 9).encode({"prompt": [{"role": "user", "content": "7"}]})


def test_tools_are_shown_in_every_prompt_and_change_what_is_kept_of_them(tokenizer: Tokenizer) -> None:
    source = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}" + TEMPLATE
    row = {"prompt": [{"role": "user", "content": "7"}]}
    encoders = [
        PromptEncoder(tokenizer, ChatTemplate(source), 9, [{"function": {"name": name}} for name in names])
        for names in ((), ("a",), ("a", "b"))
    ]
    texts = [tokenizer.decode(encoder.encode(row).ids.tolist()) for encoder in encoders]
    assert texts == ["(7)=", "a(7)=", "ab(7)="] and len({encoder.key for encoder in encoders}) == 3
    for wrong, words in (
        ({"prompt": "7="}, "the prompt is a text and the job has tools"),
        ({**row, "tools": [{"function": {"name": "b"}}]}, "the row has tools of its own and the job has others"),
    ):
        with pytest.raises(ConfigError, match=words):
            encoders[1].encode(wrong)


def test_steps_that_share_prompts_count_as_one_place(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [{"prompt": f"{number}="} for number in range(8)]
    first = batches(tmp_path, tokenizer, rows, steps_each=3)
    texts = [[row.columns["prompt"] for row in first.prompts(step)] for step in (0, 3, 6)]
    assert texts == [["0=", "1="], ["2=", "3="], ["4=", "5="]]
    later = batches(tmp_path, tokenizer, rows, steps_each=3)
    assert later.restore(json.loads(json.dumps(first.state(6)))) == 6
    assert later.prompts(6) == first.prompts(6)
    with pytest.raises(ConfigError, match="num_iterations is 2 now, and the run began with 3"):
        batches(tmp_path, tokenizer, rows, steps_each=2).restore(first.state(6))


TALK = [
    {"role": "user", "content": "1"},
    {"role": "assistant", "content": "a"},
    {"role": "user", "content": "2"},
    {"role": "assistant", "content": "aa"},
]
TURNS = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '=' + m['content'] + '<end>' }}"
    "{% else %}({{ m['content'] }}){% endif %}{% endfor %}{% if add_generation_prompt %}={% endif %}"
)


def replied(tokenizer: Tokenizer, keeps_replies: bool, longest: int = 12) -> RepliedPromptEncoder:
    template = ChatTemplate(TURNS)
    return RepliedPromptEncoder(
        PromptEncoder(tokenizer, template, longest), Encoder(tokenizer, template), keeps_replies
    )


@pytest.mark.parametrize("keeps_replies", [False, True])
def test_the_last_reply_of_a_row_may_be_written_anew(keeps_replies: bool, tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = tmp_path / "rows.jsonl"
    rows: list[dict[str, Any]] = [{"prompt": "12=", "completion": "ab"}, {"messages": TALK}]
    rows += [{"instruction": "1", "output": "b"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig((str(file),), seq_len=20, global_batch_size=3, shuffle=False)
    found = PromptBatches(config, replied(tokenizer, keeps_replies))
    prompts = [tokenizer.decode(row.ids, skip_special_tokens=False) for row in found.prompts(0)]
    assert prompts == ["12=", "(1)=a<end>(2)=", "(1)="]
    texts = [
        tokenizer.decode([label for label in row.labels.tolist() if label != IGNORED], skip_special_tokens=False)
        for row in found.rows(0)
    ]
    assert texts == (["ab<end>", "a<end>aa<end>", "b<end>"] if keeps_replies else ["", "", ""])


@pytest.mark.parametrize(
    ("row", "keeps_replies", "words"),
    [
        ({"prompt": "1="}, True, "has no reply, and steps of data learn from one"),
        ({"text": "1=a"}, False, "has no prompt"),
        ({"text": "1=a"}, True, "has no prompt"),
        ({"prompt": "1" * 12 + "=", "completion": "a"}, True, "the prompt has 13 tokens.* leaves 12"),
        ({"messages": TALK}, False, "the prompt has 10 tokens.* leaves 9"),
    ],
)
def test_a_row_without_prompt_or_reply_is_refused(
    row: dict[str, Any], keeps_replies: bool, words: str, tokenizer: Tokenizer
) -> None:
    with pytest.raises(ConfigError, match=words):
        replied(tokenizer, keeps_replies, longest=9 if "messages" in row else 12).encode(row)
