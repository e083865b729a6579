"""What a device does during some steps: its kernels by their time, the gaps between them, and where the host waits."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

LINES = 32
"""Kernels that are told."""

GAP = 20.0
"""Microseconds without a kernel that are worth telling."""

NAME = 110
"""Characters of a kernel's name."""


class Watched:
    """What a device did: `kernels` by name with calls and microseconds, `gaps` by the kernels around."""

    def __init__(self) -> None:
        self.kernels: list[tuple[str, int, float]] = []
        self.gaps: list[tuple[str, int, float]] = []
        self.busy = self.span = 0.0

    def text(self) -> str:
        lines = [f"busy {self.busy / 1e3:.1f} ms of {self.span / 1e3:.1f} ms from the first kernel to the last"]
        lines += [f"{micros / 1e3:9.2f} ms {count:6} x {name[:NAME]}" for name, count, micros in self.kernels[:LINES]]
        lines += ["gaps, after the kernel:"]
        lines += [f"{micros / 1e3:9.2f} ms {count:6} x {name[:NAME]}" for name, count, micros in self.gaps[:12]]
        return "\n".join(lines)


@contextmanager
def told_kernels() -> Iterator[None]:
    """Profile the device meanwhile, without what the host does, and print what it did."""
    found = Watched()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        yield
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    )
    micros, calls = Counter[str](), Counter[str]()
    waits, waited = Counter[str](), Counter[str]()
    ended, before = spans[0][0], ""
    for start, end, name in spans:
        micros[name] += end - start
        calls[name] += 1
        if start - ended > GAP:
            waits[f"{before[:50]} -> {name[:50]}"] += start - ended
            waited[f"{before[:50]} -> {name[:50]}"] += 1
        ended, before = max(ended, end), name
    found.kernels = [(name, calls[name], taken) for name, taken in micros.most_common()]
    found.gaps = [(name, waited[name], taken) for name, taken in waits.most_common()]
    found.busy, found.span = float(sum(micros.values())), float(ended - spans[0][0])
    print(found.text(), flush=True)


@contextmanager
def told_waits() -> Iterator[None]:
    """Print where in the code the host waits for the device meanwhile."""
    root, found = Path(__file__).resolve().parents[2], Counter[str]()

    def told(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        path = Path(filename)
        found[f"{path.relative_to(root) if path.is_relative_to(root) else path.name}:{lineno}"] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = told
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
    print("the host waits at", *(f"  {count} x {place}" for place, count in found.most_common()), sep="\n", flush=True)
