"""The memory of a device by its own numbers, for the processor those of the process; and when work is done."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tllm.core.errors import ConfigError
from tllm.core.memory import amount, peak_bytes, reset_peak_bytes, rss_bytes
from tllm.core.processor import processor_name

CONTEXT_BYTES = 1 << 29
"""Of a device that a process takes beside its tensors, about: the driver's context and libraries' own rooms."""


def device_name(device: torch.device) -> str:
    """Where it is and what it is: "cuda:0 NVIDIA H100"."""
    if device.type == "cpu":
        return processor_name()
    if device.type == "mps":
        return f"{device} {processor_name()}"
    return f"{device} {torch.get_device_module(device).get_device_name(device)}"


def total_memory(device: torch.device) -> int:
    """All bytes of a device that is not the processor."""
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory())
    return int(torch.get_device_module(device).mem_get_info(device)[1])


def free_memory(device: torch.device) -> int:
    """Of these, what nobody holds now."""
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    return int(torch.get_device_module(device).mem_get_info(device)[0])


def available_memory(device: torch.device) -> int:
    """Of these, what this process may come to hold, with what it has taken already."""
    if device.type == "mps":
        return total_memory(device)
    return free_memory(device) + int(torch.get_device_module(device).memory_reserved(device))


def give_back_device_memory(device: torch.device) -> None:
    """Let others of this device have what this process has taken and holds nothing in."""
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


def usable_device_memory(device: torch.device, given: int | None) -> int:
    """Bytes of a device that this process may use, and no more from now on: what was given, else all.

    ConfigError for more than it has, or too little.
    """
    total = total_memory(device)
    if given is None:
        return total
    if given > total:
        raise ConfigError(f"{amount(given)} of memory were given and {device} has {amount(total)}", "give it less")
    if given < CONTEXT_BYTES:
        raise ConfigError(
            f"{amount(given)} of memory were given and a process takes {amount(CONTEXT_BYTES)} of {device} before any "
            "weight",
            "give it more",
        )
    module = torch.get_device_module(device)
    if device.type == "mps":
        module.set_per_process_memory_fraction(given / total)
    else:
        module.set_per_process_memory_fraction(given / total, device)
    return given


def held_memory(device: torch.device) -> int:
    """Bytes that this process holds now: of tensors on its device, or all of its own for the processor."""
    if device.type == "cpu":
        return rss_bytes()
    if device.type == "mps":
        return int(torch.mps.current_allocated_memory())
    return int(torch.get_device_module(device).memory_allocated(device))


def peak_memory(device: torch.device) -> int:
    """The most of it since `forget_peak`; Metal, which does not say, tells what is held now."""
    if device.type == "cpu":
        return peak_bytes()
    if device.type == "mps":
        return held_memory(device)
    return int(torch.get_device_module(device).max_memory_allocated(device))


def forget_peak(device: torch.device) -> None:
    """Let `peak_memory` begin anew from what is held now; where the system has no way to, it goes on from the start."""
    if device.type == "cpu":
        reset_peak_bytes()
    elif device.type != "mps":
        torch.get_device_module(device).reset_peak_memory_stats(device)


def wait_for(device: torch.device) -> None:
    """Return when all that the device was told to do is done: what is timed must wait for it."""
    if device.type == "mps":
        torch.mps.synchronize()
    elif device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def completed(work: Callable[[], object], device: torch.device) -> Callable[[], None]:
    """The work as what is timed: it returns when the device has done it."""

    def whole() -> None:
        work()
        wait_for(device)

    return whole
