"""A small draft model for the tiny model: one layer that learns the tiny model's own distribution (distillation).

`python -m benchmarks.models.small_draft OUT` takes some minutes on one core. It has the tiny model's tokenizer.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.processes.python_module import ROOT
from tllm.model.transformer import Transformer, build
from tllm.parallel.mesh import whole
from tllm.recipes.tiny_model import CONFIG, EvenCausal, texts
from tllm.spec.families import spec_from_config
from tllm.text.tokenizer import Tokenizer
from tllm.weights.byte_source import LocalFiles
from tllm.weights.export import export_folder, parts_of
from tllm.weights.formats.open_index import open_index
from tllm.weights.load import load

TEACHER = ROOT / "models" / "tiny"
SMALL = CONFIG | dict(hidden_size=96, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4)
ROWS, LENGTH, RATE = 16, 128, 6e-3


def teacher() -> Transformer:
    spec = spec_from_config(CONFIG)
    model = build(spec, whole(spec), torch.bfloat16, "meta")
    load(model, open_index(LocalFiles(TEACHER), CONFIG), LocalFiles(TEACHER), torch.bfloat16)
    return model


def student() -> Transformer:
    spec = spec_from_config(SMALL)
    model = build(spec, whole(spec), torch.float32)
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.5 * parameter.shape[-1] ** -0.5)
        else:
            torch.nn.init.ones_(parameter)
    return model


def distil(ids: Tensor, steps: int) -> Transformer:
    """Minimise the cross-entropy between the teacher's distribution and the student's on windows of text."""
    large, small = teacher(), student()
    optimizer = torch.optim.AdamW(small.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps, pct_start=0.05)
    chance, positions_T = torch.Generator().manual_seed(0), torch.arange(LENGTH).repeat(ROWS)
    for step in range(steps):
        starts = torch.randint(0, len(ids) - LENGTH, (ROWS,), generator=chance)
        window = torch.stack([ids[at : at + LENGTH] for at in starts.tolist()]).flatten()
        with torch.no_grad():
            attend = EvenCausal(ROWS, large.attention_specs())
            wanted_TV = large.logits(large(window, positions_T, attend)).float().softmax(-1)
        with torch.autocast("cpu", torch.bfloat16):
            logits_TV = small.logits(small(window, positions_T, EvenCausal(ROWS, small.attention_specs())))
        loss = F.cross_entropy(logits_TV.float(), wanted_TV)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(small.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            alike = (logits_TV.argmax(-1) == wanted_TV.argmax(-1)).float().mean()
            print(f"step {step}: loss {loss.item():.3f}, {100 * alike.item():.0f} % of likeliest tokens", flush=True)
    return small


def save_small_draft(out: Path, steps: int = 800) -> Path:
    """Make it, in a folder of its own."""
    tokenizer = Tokenizer.from_folder(TEACHER)
    assert tokenizer is not None
    ids = torch.tensor([i for one in tokenizer.inner.encode_batch(texts()[::4]) for i in (*one.ids, 0)])
    export_folder(out, SMALL, {0: parts_of(distil(ids, steps))}, dtype=torch.bfloat16)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TEACHER / name, out / name)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=800)
    options = parser.parse_args()
    torch.set_num_threads(1)
    save_small_draft(options.out, options.steps)


if __name__ == "__main__":
    main()
