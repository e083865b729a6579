"""Which device a process computes on: `--device auto|cpu|cuda|cuda:1|xpu|mps` as a `torch.device`, or why it cannot."""

from __future__ import annotations

import re
from typing import NamedTuple

import torch

from tllm.core.errors import ConfigError, counted

CPU = torch.device("cpu")

WRITTEN = re.compile(r"(auto|cpu|cuda|xpu|mps)(?::(\d{1,3}))?")
FORMS = "one of auto, cpu, cuda, cuda:1, xpu, xpu:1 and mps"


class Kind(NamedTuple):
    """A kind of device: what it is called in words, and who makes torch find one."""

    words: str
    needs: str


KINDS = {
    "cuda": Kind("CUDA device", "NVIDIA driver (nvidia-smi shows it) or ROCm's"),
    "xpu": Kind("XPU", "Intel GPU driver"),
    "mps": Kind("Metal device", "macOS of a version with Metal"),
}
"""In the order in which `auto` looks for them."""


def choose_device(wanted: str, place: int = 0) -> torch.device:
    """The device that is `wanted`; `auto` is the first kind of which there is one with float64, else the processor.

    Without an index it is that of the process's own `place`, its number among those of this machine: each has a device
    of its own. ConfigError for a device that is not here; its message says what is.
    """
    found = WRITTEN.fullmatch(wanted)
    if found is None or (found[1] in ("auto", "cpu", "mps") and found[2] is not None):
        raise ConfigError(f"{wanted!r} is no device", FORMS)
    kind, index = found[1], found[2]
    if kind == "auto":
        kind = next((kind for kind in KINDS if count_of(kind) and has_float64(torch.device(kind, 0))), "cpu")
    if kind == "cpu":
        return CPU
    count = count_of(kind)
    if not count:
        raise _none(wanted, kind)
    if kind == "mps":
        return torch.device("mps", 0)
    last = f" to {kind}:{count - 1}" if count > 1 else ""
    words = f"{counted(count, KINDS[kind].words)} ({kind}:0{last})"
    if index is not None and int(index) >= count:
        raise ConfigError(f"--device {wanted} and this machine has {words}", "they are counted from 0")
    if index is None and place >= count:
        raise ConfigError(
            f"this is process {place + 1} of this machine, each of which has a device of its own, and it has {words}",
            f"start {count} here, or let all share one: --device {kind}:0",
        )
    return torch.device(kind, place if index is None else int(index))


def count_of(kind: str) -> int:
    """How many devices of a kind torch can use here."""
    if kind == "mps":
        return int(torch.backends.mps.is_available())
    module = torch.get_device_module(kind)
    return module.device_count() if module.is_available() else 0


def compute_on(device: torch.device) -> None:
    """Let this thread's kernels run on the device, where a library or a compiler asks for no tensor's own."""
    if device.type in ("cuda", "xpu"):
        torch.get_device_module(device).set_device(device)


def has_float64(device: torch.device) -> bool:
    """Metal and some Intel GPUs have none. Whatever the dtype of a model, tokens are drawn and gradients are summed up
    in it."""
    return device.type != "mps" and (device.type != "xpu" or torch.xpu.get_device_properties(device).has_fp64)


def check_float64(device: torch.device) -> None:
    """ConfigError for a device without float64."""
    if not has_float64(device):
        raise ConfigError(
            f"{device} has no float64, in which tokens are drawn and gradients are summed up", "give --device cpu"
        )


def _none(wanted: str, kind: str) -> ConfigError:
    """Why there is no device of a kind: by the build of torch, or by the machine."""
    words, needs = KINDS[kind]
    built = {
        "cuda": torch.version.cuda or torch.version.hip,
        "xpu": torch.version.xpu,
        "mps": torch.backends.mps.is_built(),
    }[kind]
    if not built:
        return ConfigError(
            f"--device {wanted} and this torch ({torch.__version__}) is built without {kind}",
            f"install torch's build with {kind} in its place (its page Start Locally has the line), or --device cpu",
        )
    return ConfigError(
        f"--device {wanted} and torch ({torch.__version__}, built with {kind}) finds no {words} here",
        f"it needs an {needs}; CUDA_VISIBLE_DEVICES may hide some; or give --device cpu",
    )
