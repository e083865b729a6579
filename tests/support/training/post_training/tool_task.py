"""A task with tools, as a user would write it to disk: a model whose turns often have calls, some of which fail.

Every character is a token, and so is every one of a few whole calls. The model is random, but for how likely calls and
ends of turns are.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from tests.support.training.post_training.policy_task import grpo
from tllm.training.job.job import Job
from tllm.training.job.rollout_keys import GRPOConfig, RejectionConfig

END, UNKNOWN = "<end>", "<unknown>"
ROLES = ("<user>", "<assistant>", "<tool>")
CALLS = (
    '<tool_call>{"name": "look", "arguments": {"key": "a"}}</tool_call>',
    '<tool_call>{"name": "look", "arguments": {"key": "b"}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>',
    '<tool_call>{"name": "look", "arguments": {"key": "c"}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"a": 1, "q": 2}}</tool_call>',
    '<tool_call>{"name": "gone", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
)
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 \n?!'.:,_[]{}<>/\""

TEMPLATE = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<end>\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)

TOOLS = '''
"""Tools of the task."""


def look(key: str) -> str:
    """Look a word up.

    Args:
        key: The word.
    """
    return {"a": "x1", "b": "more of it"}[key]


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b
'''

REWARDS = '''
"""Rewards of the task."""


def found(prompts, completions, **columns):
    """1 for each result that is no error, less a little for each turn."""
    return [
        sum(one["role"] == "tool" and "error" not in one["content"] for one in turns) - 0.1 * len(turns)
        for turns in completions
    ]


def short(completions, completion_ids, **columns):
    return [-len(ids) / 160 for ids in completion_ids]
'''


def write_tool_task(folder: Path, template: str = TEMPLATE, head_dim: int = 8, seed: int = 3) -> None:
    """A model with its tokenizer and chat template, prompts, tools and rewards."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = write_tool_tokenizer(folder, template)
    write_model(folder, tokenizer, head_dim, seed)
    rows = ({"prompt": [{"role": "user", "content": f"{number}?"}], "number": number} for number in range(6))
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "tools.py").write_text(TOOLS)


def write_tool_tokenizer(folder: Path, template: str | None) -> Tokenizer:
    vocab = {END: 0, UNKNOWN: 1, **{character: number for number, character in enumerate(CHARACTERS, 2)}}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([END, UNKNOWN, *ROLES])
    tokenizer.add_tokens(list(CALLS))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    settings |= {} if template is None else {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokenizer


def write_model(folder: Path, tokenizer: Tokenizer, head_dim: int, seed: int) -> None:
    """Of random weights, but that a turn's end is likely at each token, and so are calls.

    The first number of every hidden state is about the same, and the head reads from it how likely a token is.
    """
    size = tokenizer.get_vocab_size()
    config = transformers.LlamaConfig(
        vocab_size=size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=None,
        initializer_range=0.1,
        tie_word_embeddings=False,
        torch_dtype="float32",
    )
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(config)
    likely = torch.zeros(size)
    likely[0] = math.log(0.4 * size)
    for call in CALLS:
        likely[tokenizer.token_to_id(call)] = math.log(0.4 * size / len(CALLS))
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 2.0
        model.lm_head.weight[:, 0] = likely / 4.0
    model.save_pretrained(folder)


def tool_grpo(folder: Path, **more: Any) -> GRPOConfig:
    """GRPO with tools, and four completions of each prompt."""
    return grpo(folder, **{**tool_keys(folder), **more})


def tool_keys(folder: Path) -> dict[str, Any]:
    """What both tasks take."""
    return dict(
        reward_funcs=tuple(f"{folder / 'rewards.py'}:{name}" for name in ("found", "short")),
        tools=tuple(f"{folder / 'tools.py'}:{name}" for name in ("look", "add")),
        num_generations=4,
        max_completion_length=160,
        num_completions_to_print=16,
    )


def tool_job(folder: Path, run: Path, table: GRPOConfig | RejectionConfig | None = None, **more: Any) -> Job:
    """A short job over the task in `folder`."""
    task = "rejection" if isinstance(table, RejectionConfig) else "grpo"
    fields: dict[str, Any] = dict(
        model_name_or_path=str(folder),
        train_files=(str(folder / "prompts.jsonl"),),
        output_dir=str(run),
        task=task,
        max_steps=4,
        seq_len=192,
        global_batch_size=16,
        microbatch_size=4,
        learning_rate=3e-3,
        save_steps=2,
        mirror_steps=0,
        dtype="float64",
    )
    return Job(**{**fields, task: table or tool_grpo(folder), **more})
