"""`Quantization`: which of a model's weights are in few bits, how files keep them, and what they take. No torch.

It is read from a quantised folder's `config.json` (`quantization_config`), or is what `--quantize` asks for
(`spec.hf_config`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Number = Literal["integer", "float"]

LAYERS = r"model\.layers\.\d+\..*"
"""All linears of the layers, as a pattern."""
HEAD = r"lm_head"
EMBEDDING = r"model\.embed_tokens"


@dataclass(frozen=True)
class Coding:
    """How a linear's weight [outputs, inputs] is coded.

    - `bits`: of a code.
    - `group`: columns that share a scale, 0 for all of a row.
    - `rows`: rows that share a scale, 0 for all of them.
    - `symmetric`: whether a code's value is taken from its middle; there is a zero for each group otherwise.
    - `number`: whether a code is a whole number or a floating-point number.
    - `beside`: bits that a group takes in memory beside its codes: its scale, and its minimum, which a zero becomes.
    - `scattered`: whether the columns of a group lie anywhere, so that the weight is held as plain numbers.
    - `zero_offset`: what is added to each zero of the files: 1 where they keep one less.
    """

    bits: int
    group: int = 0
    rows: int = 1
    symmetric: bool = True
    number: Number = "integer"
    beside: int = 16
    scattered: bool = False
    zero_offset: int = 0

    def held_bits(self, columns: int) -> float | None:
        """Bits of one weight in memory, its part of the group's numbers included; None where it is a plain number."""
        if self.scattered or not has_products(self.group):
            return None
        return self.bits + self.beside / min(self.group or columns, columns)


def has_products(group: int) -> bool:
    """Whether products read weights in groups of so many columns, 0 being all of a row: of 16, or of whole 32s."""
    return group == 16 or group % 32 == 0


@dataclass(frozen=True)
class Quantization:
    """The codings of a model. `method` is `quant_method` of the config, or what was asked for while loading.

    The first of the `rules` whose pattern matches the whole name of a module counts, None being a plain module.
    """

    method: str
    rules: tuple[tuple[str, Coding | None], ...]

    def coding(self, module: str) -> Coding | None:
        """How a module's weight is coded, by its name without `.weight`; None where it is in plain numbers."""
        for pattern, coding in self.rules:
            if re.fullmatch(pattern, module):
                return coding
        return None

    def bits_of(self, module: str, columns: int) -> float | None:
        """Bits of each weight of a module in memory; None where it is a plain number. `columns` are its inputs."""
        coding = self.coding(module)
        return None if coding is None else coding.held_bits(columns)
