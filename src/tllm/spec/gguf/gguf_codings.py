"""How the weights of a GGUF file are held in memory: the codings of its types, and which module has which. No torch."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from tllm.spec.quantized.weight_bits import Coding, Quantization

TYPES = "_gguf_types"
"""The key of a config that gives the type of each module, as `gguf_config` writes it."""

CODINGS = {
    "Q4_0": Coding(4, 32),
    "Q4_1": Coding(4, 32, beside=32),
    "Q5_0": Coding(8, 32),
    "Q5_1": Coding(8, 32, beside=32),
    "Q8_0": Coding(8, 32),
    "Q2_K": Coding(4, 16, beside=18),
    "Q3_K": Coding(4, 16, beside=9),
    "Q4_K": Coding(4, 32, beside=20),
    "Q5_K": Coding(8, 32, beside=20),
    "Q6_K": Coding(8, 16, beside=9),
    "IQ4_NL": Coding(4, 32),
    "IQ4_XS": Coding(4, 32, beside=10),
    "MXFP4": Coding(4, 32, beside=8),
}
"""Codes of 2 and 3 bits take 4 in memory, those of 5 and 6 take 8. K-quants have a byte for each scale and minimum, and
2 for 256 columns."""

LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


def gguf_quantization(config: Mapping[str, Any]) -> Quantization | None:
    """The codings of a GGUF file's modules, from its config; None where this is not one, or has plain numbers only."""
    layers: dict[tuple[str, str], list[str]] = defaultdict(list)
    rules: list[tuple[str, Coding | None]] = []
    for module, kind in config.get(TYPES, {}).items():
        found = LAYER.fullmatch(module)
        if found is None:
            rules.append((re.escape(module), CODINGS[kind]))
        else:
            layers[found[2], kind].append(found[1])
    for (part, kind), numbers in layers.items():
        of_experts = re.escape(part).replace(r"\{\}", r"\d+")
        rules.append((rf"model\.layers\.({'|'.join(numbers)})\.{of_experts}", CODINGS[kind]))
    return Quantization("gguf", tuple(rules)) if rules else None
