"""Numbers with units, as people write speeds and sizes: 0.2 ms, 1 Gbit/s, 125 MB/s, 8 GiB, 989 Tflop/s."""

from __future__ import annotations

import math
import re

from tllm.core.errors import ConfigError

SCALE = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
WRITTEN = re.compile(r"([-+]?[0-9.]+(?:e[-+]?\d+)?)\s*(\S*)", re.IGNORECASE)

SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0, "d": 86400.0}
BYTES = {f"{letter}B": scale for letter, scale in SCALE.items()} | {
    f"{letter}iB": 2.0 ** (10 * power) for power, letter in enumerate("KMGT", 1)
}
BYTES_PER_SECOND = {f"{letter}B/s": scale for letter, scale in SCALE.items()} | {
    f"{letter}bit/s": scale / 8 for letter, scale in SCALE.items()
}
FLOPS = {f"{letter}flop/s": scale for letter, scale in SCALE.items()}


def quantity(given: float | str, units: dict[str, float], name: str) -> float:
    """A number as it is, or text with one of the `units`. ConfigError, which calls it `name`, for anything else."""
    if isinstance(given, str):
        match = WRITTEN.fullmatch(given.strip())
        known = {unit.lower(): scale for unit, scale in units.items()}
        if match is None or match[2].lower() not in known or not _is_number(match[1]):
            raise ConfigError(f"{name} is {given!r}", f"give a number with one of the units {', '.join(units)}")
        return float(match[1]) * known[match[2].lower()]
    return float(given)


def positive(given: float | str, units: dict[str, float], name: str) -> float:
    """The same, above 0."""
    value = quantity(given, units, name)
    if not 0 < value < math.inf:
        raise ConfigError(
            f"{name} is {shown(given)} and must be more than 0", f"for example {name} = 1 {next(iter(units))}"
        )
    return value


def shown(given: float | str) -> str:
    """As it was written, about."""
    return given if isinstance(given, str) else f"{given:g}"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
