"""Make the tiny model that ships with the project: `python -m tllm.recipes.tiny_model OUT` (or `make tiny-model`).

A llama of 2.0 M parameters with its own tokenizer, trained on text that every Python installation carries: the
language reference that `help()` reads, and the standard library's sources. About 40 minutes on one core.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sysconfig
import time
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from tllm.model.attention import AttentionSpec
from tllm.model.transformer import Transformer, build
from tllm.parallel.mesh import whole
from tllm.spec.families import spec_from_config
from tllm.weights.export import export_folder, parts_of

END = "<|endoftext|>"
CONFIG: dict[str, Any] = dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    vocab_size=2048,
    hidden_size=160,
    intermediate_size=400,
    num_hidden_layers=6,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=32,
    hidden_act="silu",
    max_position_embeddings=512,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    tie_word_embeddings=True,
    bos_token_id=None,
    eos_token_id=0,
    torch_dtype="bfloat16",
)
TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt and messages and messages[-1]['role'] != 'assistant' %}\n{% endif %}"
)
"""The model only continues text, so a chat is its messages one after the other."""

LEFT_OUT = (
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "site-packages",
    "__pycache__",
    "encodings",
    "pydoc_data",
    "turtledemo",
)


class EvenCausal:
    """Causal attention over `rows` sequences of the same length, packed one after the other."""

    def __init__(self, rows: int, specs: dict[int, AttentionSpec]) -> None:
        self.rows = rows
        self.specs = specs

    def __call__(
        self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, sinks_N: Tensor | None = None
    ) -> Tensor:
        q, k, v = (x.view(self.rows, -1, *x.shape[1:]).transpose(1, 2) for x in (q_TNH, k_TKH, v_TKH))
        scale = self.specs[layer].scale
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)


def texts() -> list[str]:
    """The language reference three times, as prose is rarer than code; then each source file once, in a fixed order."""
    reference = [text.strip() for _, text in sorted(topics.topics.items())] * 3
    library = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in library.rglob("*.py") if not set(path.relative_to(library).parts) & set(LEFT_OUT))
    return reference + [path.read_text("utf-8", errors="replace") for path in files]


def train_bpe_tokenizer(corpus: list[str]) -> Tokenizer:
    """A byte-level BPE whose id 0 ends a document."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG["vocab_size"], special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


def fresh_model(seed: int) -> Transformer:
    """The model with small random weights, in float32, ready to train."""
    spec = spec_from_config(CONFIG)
    model = build(spec, whole(spec), torch.float32)
    torch.manual_seed(seed)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.ones_(parameter)
        else:
            torch.nn.init.normal_(parameter, std=0.5 * parameter.shape[-1] ** -0.5)
        parameter.requires_grad_(True)
    return model


def train(model: Transformer, ids: Tensor, minutes: float, rows: int = 16, length: int = 256) -> float:
    """Train with AdamW for `minutes`, warm-up and cosine schedule; returns the mean loss of the last 100 steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.95), weight_decay=0.05, fused=True)
    generator = torch.Generator().manual_seed(0)
    attend = EvenCausal(rows, model.attention_specs())
    positions_T = torch.arange(length).repeat(rows)
    start, step, losses = time.monotonic(), 0, []
    while (done := (time.monotonic() - start) / (60 * minutes)) < 1:
        rate = 4e-3 * min(1, (step + 1) / 100) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        starts = torch.randint(0, len(ids) - length - 1, (rows,), generator=generator)
        window = torch.stack([ids[at : at + length + 1] for at in starts.tolist()])
        with torch.autocast("cpu", torch.bfloat16):
            logits = model.logits(model(window[:, :-1].flatten(), positions_T, attend))
        loss = F.cross_entropy(logits.float(), window[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 100 == 0:
            print(f"step {step:6d}  loss {sum(losses[-100:]) / len(losses[-100:]):.3f}  {100 * done:.0f} %", flush=True)
        step += 1
    return sum(losses[-100:]) / len(losses[-100:])


def save(model: Transformer, tokenizer: Tokenizer, out: Path) -> None:
    """Write a Hugging Face folder, in place of the last one: bfloat16 weights, config, tokenizer and chat template."""
    out = out.resolve()  # `models/tiny` is a link to where the package has it
    if (out / "tllm.manifest.json").is_file():
        shutil.rmtree(out)
    export_folder(out, CONFIG, {0: parts_of(model)}, dtype=torch.bfloat16)
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "chat_template": TEMPLATE}
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=40)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    corpus = texts()
    tokenizer = train_bpe_tokenizer(corpus)
    ids = torch.tensor([i for encoding in tokenizer.encode_batch(corpus) for i in (*encoding.ids, 0)])
    print(f"{len(corpus)} texts, {sum(map(len, corpus)):,} characters, {len(ids):,} tokens")
    model = fresh_model(seed=0)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    loss = train(model, ids, options.minutes)
    save(model, tokenizer, options.out)
    print(f"loss {loss:.3f}, saved to {options.out}")


if __name__ == "__main__":
    main()
