"""`Profile`: what one machine was measured to do, in a JSON file that people can read and plans are made from. No
torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import msgspec

from tllm.core.errors import UNREADABLE, ConfigError

VERSION = 1
MAY_BE_ZERO = ("wire.jitter", "hardware.load", "hardware.memory_free_bytes")
REDO = "`tllm profile --out FILE` writes a new one"


class ProductSpeed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How fast `rows` tokens go through a `width` x `width` weight: the median of `repeats` products.

    A small weight stays in the cache from one product to the next; those of a model come from memory. `product` names
    the one that was found to be fastest. The dtypes int8 and int4 are weights that are rounded to few bits.
    """

    dtype: str
    rows: int
    width: int
    flops_per_second: float
    repeats: int
    product: str = ""


class MemorySpeed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes per second of main memory."""

    read: float
    """Read by a matrix-vector product."""
    copy: float
    """Read and written, together, by a copy."""


class LoopbackWire(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor link between two processes of this machine, with TLS: the least that a link to another one costs."""

    latency: float
    """Seconds one way: half a round trip."""
    jitter: float
    """Seconds by which one round trip differs from the next."""
    bandwidth: float
    """Bytes per second one way."""


class ShapeChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The way that is taken for what is alike ("rows=1 outputs=4096 ..."), and the best seconds of every way."""

    what: str
    shape: str
    taken: str
    seconds: dict[str, float]


class Hardware(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The machine in words and counts. `cores` are those that this process may use, `threads` those that it used.

    `load`: how much other work there was, in processors; with more than a little the speeds are too low. `device`: what
    was measured, whose memory this is, if that is not the machine's processors.
    """

    processor: str
    instructions: tuple[str, ...]
    cores: int
    threads: int
    load: float
    memory_bytes: int
    memory_free_bytes: int
    system: str
    device: str = ""


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One machine at one time. `operation`: seconds that one operation costs on a tensor of one element."""

    version: int = VERSION
    date: str
    tllm: str
    torch: str
    hardware: Hardware
    products: tuple[ProductSpeed, ...]
    memory: MemorySpeed
    operation: float
    wire: LoopbackWire | None = None
    choices: tuple[ShapeChoice, ...] = ()

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Those whose products were measured."""
        return tuple(dict.fromkeys(product.dtype for product in self.products))

    def matrix_rate(self, dtype: str, rows: int, width: int | None = None) -> float:
        """Floating-point operations per second with so many rows, between the rows measured by their logarithm.

        Of the widths measured the one nearest to `width` counts, the widest if none is given. ConfigError for a dtype
        that was not measured.
        """
        of_dtype = [product for product in self.products if product.dtype == dtype]
        if not of_dtype:
            raise ConfigError(
                f"the profile has no products in {dtype}", f"it has {', '.join(self.dtypes) or 'none'}; {REDO}"
            )
        widths = {product.width for product in of_dtype}
        nearest = max(widths) if width is None else min(widths, key=lambda known: (abs(math.log(known / width)), known))
        points = sorted((p.rows, p.flops_per_second) for p in of_dtype if p.width == nearest)
        return between(points, rows)

    def save(self, path: Path) -> None:
        """Write it for `read_profile`. ConfigError where the file cannot be written."""
        try:
            path.write_text(self.text())
        except OSError as error:
            raise ConfigError(
                f"cannot write {path}: {error.strerror}", "give --out a file that can be written"
            ) from error

    def text(self) -> str:
        """The file's text: JSON, one value a line."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode() + "\n"


def read_profile(path: Path) -> Profile:
    """Read a profile. ConfigError for a file that is none, of another version, or with a speed that cannot be."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the profile {path}: {error.strerror}", REDO) from error
    try:
        version = msgspec.json.decode(content, type=_Versioned).version
        if version != VERSION:
            raise ConfigError(f"{path} is a profile of version {version}, and this tllm reads {VERSION}", REDO)
        profile = msgspec.json.decode(content, type=Profile)
    except UNREADABLE as error:
        raise ConfigError(f"{path} is not a profile: {error}", REDO) from error
    for name, value in _numbers(profile, ""):
        if not 0 < value < math.inf and name not in MAY_BE_ZERO:
            raise ConfigError(f"{path} is not a profile: {name} is {value:g} and must be more than 0", REDO)
    return profile


class _Versioned(msgspec.Struct):
    version: int


def between(points: Sequence[tuple[float, float]], rows: float) -> float:
    """Linear interpolation between the points over the logarithm of rows; constant beyond both ends."""
    if rows <= points[0][0]:
        return points[0][1]
    for (low, at_low), (high, at_high) in pairwise(points):
        if rows <= high:
            return at_low + (at_high - at_low) * math.log(rows / low) / math.log(high / low)
    return points[-1][1]


def _numbers(value: msgspec.Struct, prefix: str) -> list[tuple[str, float]]:
    """Every number in a struct, by its dotted name."""
    numbers: list[tuple[str, float]] = []
    for name in value.__struct_fields__:
        field = getattr(value, name)
        for item in field if isinstance(field, tuple) else (field,):
            if isinstance(item, msgspec.Struct):
                numbers += _numbers(item, f"{prefix}{name}.")
            elif isinstance(item, int | float):
                numbers.append((prefix + name, item))
    return numbers
