"""The demonstration's second half: train a small model from nothing over two processes, its loss drawn as it falls."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from pydoc_data import topics
from typing import Any

from tllm.api.trainer import Trainer
from tllm.cli.display.curve import curve
from tllm.training.report.console import show_seconds
from tllm.training.report.events import RunEnded, RunStepped

PLAN = "dp=2"
CONFIG = dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    vocab_size=1024,
    hidden_size=128,
    intermediate_size=320,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    hidden_act="silu",
    max_position_embeddings=256,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    initializer_range=0.05,
    tie_word_embeddings=True,
    bos_token_id=None,
    eos_token_id=0,
    torch_dtype="float32",
)
STEPS = 200
"""About a minute on two cores."""
SECONDS_BETWEEN_LINES = 10.0

Draw = Callable[[list[float], float], None]
"""draw(losses so far, seconds so far)"""


def demo_job(folder: Path, steps: int) -> dict[str, Any]:
    """A job that trains on the text of Python's `help()`, which every installation has; its files are written here."""
    texts = [text.strip() for _, text in sorted(topics.topics.items())]
    rows, config = folder / "reference.jsonl", folder / "config.json"
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")
    config.write_text(json.dumps(CONFIG), "utf-8")
    return dict(
        output_dir=str(folder / "run"),
        train_files=[str(rows)],
        config_name=str(config),
        max_steps=steps,
        seq_len=256,
        global_batch_size=24,
        microbatch_size=12,
        learning_rate=4e-3,
        lr_scheduler_type="cosine",
        warmup_steps=min(20, steps // 2),
        weight_decay=0.05,
        adam_beta2=0.95,
        save_steps=steps,
        plan=PLAN,
    )


async def train_demo(folder: Path, steps: int) -> Path:
    """Train, draw, and return the finished model's folder."""
    trainer = Trainer(demo_job(folder, steps))
    losses: list[float] = []
    seconds, final = 0.0, ""
    print(f"\na new model of {CONFIG['num_hidden_layers']} layers, trained on the Python reference by 2 processes\n")
    with ExitStack() as stack:
        draw = _on_terminal(stack, steps) if sys.stdout.isatty() else _as_lines(steps)
        async with trainer.open(on_loss="end") as run:
            async for event in trainer.follow(run):
                if isinstance(event, RunStepped):
                    losses.append(event.record.loss)
                    seconds += event.record.seconds
                    draw(losses, seconds)
                elif isinstance(event, RunEnded):
                    final = event.final
    print(f"\nloss {losses[0]:.2f} -> {losses[-1]:.2f} in {len(losses)} steps, {show_seconds(seconds)}")
    return Path(final)


def _as_lines(steps: int) -> Draw:
    """Without a terminal: a line now and then, and the curve at the end."""
    last_line_at = 0.0

    def draw(losses: list[float], seconds: float) -> None:
        nonlocal last_line_at
        if len(losses) == steps:
            print("\n".join(curve(losses, steps=steps)), flush=True)
        elif seconds - last_line_at >= SECONDS_BETWEEN_LINES:
            last_line_at = seconds
            print(f"step {len(losses)}/{steps}  loss {losses[-1]:.3f}", flush=True)

    return draw


def _on_terminal(stack: ExitStack, steps: int) -> Draw:
    from rich.live import Live
    from rich.text import Text

    live = stack.enter_context(Live(refresh_per_second=4))

    def draw(losses: list[float], seconds: float) -> None:
        left = seconds / len(losses) * (steps - len(losses))
        line = f"step {len(losses)}/{steps}  loss {losses[-1]:.3f}  {show_seconds(left)} left"
        live.update(Text("\n".join([*curve(losses, steps=steps), line]), no_wrap=True, overflow="crop"))

    return draw
