"""A step as one line for people: numbers of equal width, so that a column can be read downwards."""

from __future__ import annotations

from tllm.training.report.metrics import StepRecord

UNITS = ("B", "KB", "MB", "GB", "TB")

TELLING = {"reward": "reward", "rewards/margins": "margin", "accuracy": "accuracy", "divergence": "divergence"}
"""Of what tasks tell beside their loss, what says whether they learn: GRPO's loss is 0, say, whatever it learns."""

TAUGHT = "teacher_bytes_per_token"
"""Messages to and from teachers elsewhere; 0 of one beside the student."""

LEAST_FIRST = ("sent", "bubble", "mem", "mfu", "lr", "norm", "tok/s")
"""What a narrow terminal does without, before what the task tells, the time left and the loss."""


def step_line(record: StepRecord, max_steps: int, average_seconds: float | None = None, room: int | None = None) -> str:
    """`step 30/500  loss 2.3456  norm 1.02  lr 3.00e-04  12,345 tok/s  …`; what was not measured is left out.

    `average_seconds` a step gives the time left. Where that is more than `room` characters, parts are left out
    that say less (`LEAST_FIRST`).
    """
    width = len(str(max_steps))
    told = {f"told {n}": one for n, one in enumerate(_told(record))}
    parts = {
        "step": f"step {record.step:{width}d}/{max_steps}",
        "loss": f"loss {record.loss:8.4f}",
        **told,
        "norm": f"norm {record.grad_norm:8.3f}",
        "lr": f"lr {record.learning_rate:.2e}",
        "tok/s": f"{record.tokens_per_second:9,.0f} tok/s",
    }
    if record.mfu is not None:
        parts["mfu"] = f"mfu {100 * record.mfu:4.1f} %"
    if record.memory is not None:
        parts["mem"] = f"mem {show_bytes(record.memory)}"
    if record.bubble is not None:
        parts["bubble"] = f"bubble {100 * record.bubble:4.1f} %"
    if record.bytes_sent:
        parts["sent"] = f"sent {show_bytes(record.bytes_sent)}"
    if average_seconds is not None:
        parts["left"] = f"left {show_seconds((max_steps - record.step) * average_seconds)}"
    for name in (*LEAST_FIRST, *reversed(told), "left", "loss"):
        if room is None or len("  ".join(parts.values())) <= room:
            break
        parts.pop(name, None)
    return "  ".join(parts.values())


def _told(record: StepRecord) -> list[str]:
    """What the task tells, and the loss of rows held out after an evaluation."""
    metrics = record.metrics or {}
    told = [f"{name} {metrics[key]:7.3f}" for key, name in TELLING.items() if key in metrics]
    if metrics.get(TAUGHT):
        told.append(f"teacher {show_bytes(metrics[TAUGHT])}/tok")
    if record.eval_loss is not None:
        told.append(f"eval {record.eval_loss:.4f}")
    if "reward" in (record.eval_metrics or {}):
        told.append(f"eval reward {(record.eval_metrics or {})['reward']:.4f}")
    if record.eval_perplexity is not None:
        told.append(f"perplexity {record.eval_perplexity:.4g}")
    return told


def show_bytes(count: float) -> str:
    """`1.5 GB`, in powers of 1000."""
    unit = 0
    while count >= 1000 and unit + 1 < len(UNITS):
        count, unit = count / 1000, unit + 1
    return f"{count:.0f} {UNITS[0]}" if unit == 0 else f"{count:.1f} {UNITS[unit]}"


def show_seconds(seconds: float) -> str:
    """`45s`, `3m20s`, `2h05m`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
