"""A task whose completions can be checked, with a tokenizer of single characters, as a user would write it to disk.

The prompt `3=` is answered by three `a` and the end: a model must count.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from tllm.training.job.job import Job
from tllm.training.job.rollout_keys import GRPOConfig, RejectionConfig

END = "<end>"
CHARACTERS = "0123456789=ab()"

REWARDS = '''
"""Rewards of the counting task."""


def correct(prompts, completions, **columns):
    return [float(text == "a" * count) for text, count in zip(completions, columns["count"], strict=True)]


def closeness(prompts, completions, completion_ids, count, **columns):
    """1 for the right number of `a`, less for each that is too much or too little or another character."""
    return [
        1 - (abs(text.count("a") - wanted) + len(text) - text.count("a")) / 8
        for text, wanted in zip(completions, count, strict=True)
    ]
'''

CONFIG: dict[str, Any] = dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    hidden_act="silu",
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    torch_dtype="float32",
    vocab_size=len(CHARACTERS) + 1,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    bos_token_id=None,
    eos_token_id=0,
    pad_token_id=None,
    initializer_range=0.1,
    tie_word_embeddings=False,
)


def write_tokenizer(folder: Path) -> None:
    """Every character is a token, and token 0 ends a text."""
    vocab = {END: 0, **{character: number for number, character in enumerate(CHARACTERS, 1)}}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=END))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([END])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_task(folder: Path, counts: range = range(1, 6)) -> None:
    """A model's config and tokenizer, prompts and reward functions."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    write_tokenizer(folder)
    rows = ({"prompt": f"{count}=", "count": count} for count in counts)
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(REWARDS)


def policy_job(folder: Path, run: Path, table: GRPOConfig | RejectionConfig | None = None, **more: Any) -> Job:
    """A short job over the task in `folder`."""
    task = "rejection" if isinstance(table, RejectionConfig) else "grpo"
    fields: dict[str, Any] = dict(
        config_name=str(folder / "config.json"),
        tokenizer_name=str(folder / "tokenizer.json"),
        train_files=(str(folder / "prompts.jsonl"),),
        output_dir=str(run),
        task=task,
        max_steps=4,
        seq_len=16,
        global_batch_size=16,
        microbatch_size=4,
        learning_rate=1e-2,
        save_steps=2,
        mirror_steps=0,
    )
    return Job(**{**fields, task: table or grpo(folder), **more})


def grpo(folder: Path, **more: Any) -> GRPOConfig:
    """GRPO with four completions of each prompt, of eight tokens at most."""
    fields: dict[str, Any] = dict(
        reward_funcs=(f"{folder / 'rewards.py'}:closeness",), num_generations=4, max_completion_length=8
    )
    return GRPOConfig(**{**fields, **more})


def counting_job(folder: Path, run: Path, **more: Any) -> Job:
    """A hundred steps in which a model of random weights learns to count."""
    names = tuple(f"{folder / 'rewards.py'}:{name}" for name in ("closeness", "correct"))
    fields: dict[str, Any] = dict(
        global_batch_size=80, microbatch_size=80, max_steps=100, save_steps=100, learning_rate=5e-3
    )
    table = grpo(folder, reward_funcs=names, num_generations=8, max_num_seqs=64)
    return policy_job(folder, run, table, **{**fields, **more})
