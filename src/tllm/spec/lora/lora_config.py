"""`LoraConfig`: what a LoRA adapter (2106.09685) says of itself, in the keys of PEFT's `adapter_config.json`.

An adapted linear W x becomes W x + scale B A x, where A has r rows and B as many columns, and scale is lora_alpha / r,
or lora_alpha / sqrt(r) with `use_rslora` (2312.03732). With `use_dora` (2402.09353) each output is then multiplied by
a learned magnitude over the norm of its row of W + scale B A.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from tllm.core.errors import UNREADABLE, WeightsError, nearest
from tllm.spec.quantized.quantization_config import text_name

CONFIG_FILE = "adapter_config.json"
CONFIG_LIMIT = 1 << 20
"""Bytes of such a file that are read at most."""

MAX_LORA_RANK = 16
"""The largest rank that is served where nobody says otherwise, as vLLM has it."""

MAX_PATTERNS = 4096
MAX_RANK = 4096

T = TypeVar("T")

HARMLESS = frozenset({
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "exclude_modules", "layers_to_transform", "layers_pattern", "lora_dropout", "bias", "megatron_core",
    "qalora_group_size", "init_lora_weights", "eva_config", "ensure_weight_tying",
})  # fmt: skip
"""Keys that say how an adapter was trained or found, and those that `_check` looks at. Which modules are adapted the
tensors of the file say."""

UNSUPPORTED = {
    "modules_to_save": "train without modules_to_save, or merge the adapter into the model with PEFT and serve that",
    "fan_in_fan_out": "no model that runs here keeps its weights transposed",
    "lora_bias": "train without lora_bias, or merge the adapter with PEFT and serve that",
    "loftq_config": "serve the model that LoftQ made as a plain folder, with its adapter merged by PEFT",
    "trainable_token_indices": "train without it, or merge the adapter with PEFT and serve that",
    "target_parameters": "is adapter_model.safetensors in the same folder? Its stacked experts are taken apart",
    "layer_replication": "merge the adapter with PEFT and serve that",
}
"""Keys that would change what is computed, and what to do about each."""

CONVERTIBLE = "save it as a plain adapter: PEFT's save_pretrained with path_initial_model_for_weight_conversion"
INITIAL = (True, False, "gaussian", "eva", "orthogonal")
"""What `init_lora_weights` may be: others change the weights of the model itself, which this server has unchanged."""


class LoraConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The keys that decide what is computed.

    `rank_pattern` and `alpha_pattern` say otherwise than `r` and `lora_alpha` for modules whose name ends with a key,
    or is it where the key begins with ^; in a model that also sees, names of the whole count as of its text part.
    `target_modules` are ends of names, or "all-linear", or an expression.
    """

    r: int = 8
    lora_alpha: float = 8.0
    use_rslora: bool = False
    use_dora: bool = False
    target_modules: tuple[str, ...] | str | None = None
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}

    def rank(self, module: str) -> int:
        """The rank of a module's update, by the module's name in the model."""
        return _by_pattern(self.rank_pattern, module, self.r)

    def scale(self, module: str) -> float:
        """What B A x is multiplied by."""
        alpha, rank = _by_pattern(self.alpha_pattern, module, self.lora_alpha), self.rank(module)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def names(self, module: str) -> bool:
        """Whether a module is among the targets. Where these are an expression, the file's tensors are believed."""
        if not isinstance(self.target_modules, tuple):
            return True
        return any(module == end or module.endswith(f".{end}") for end in map(text_name, self.target_modules))


class ServedLoras(msgspec.Struct, frozen=True):
    """The adapters that a cluster serves: how many and of which rank at most, and the folder of each by its name."""

    max_loras: int
    max_lora_rank: int
    paths: dict[str, str]


def read_lora_config(content: bytes) -> LoraConfig:
    """The content of an `adapter_config.json`. WeightsError for what cannot be computed as it says, with its key."""
    try:
        raw = msgspec.json.decode(content, type=dict[str, Any])
    except UNREADABLE as error:
        raise WeightsError(f"{CONFIG_FILE} is no table in JSON: {error}", "copy the adapter again") from error
    _check(raw)
    try:
        config = msgspec.convert(raw, LoraConfig)
    except UNREADABLE as error:
        raise WeightsError(f"{CONFIG_FILE} cannot be read: {error}", "copy the adapter again") from error
    for name, patterns in (("rank_pattern", config.rank_pattern), ("alpha_pattern", config.alpha_pattern)):
        _check_patterns(name, patterns)
    for rank in (config.r, *config.rank_pattern.values()):
        if not 1 <= rank <= MAX_RANK:
            raise WeightsError(f"{CONFIG_FILE} gives the rank {rank}, and ranks from 1 to {MAX_RANK} are read")
    if not all(map(math.isfinite, (config.lora_alpha, *config.alpha_pattern.values()))):
        raise WeightsError(f"{CONFIG_FILE} gives a lora_alpha that is no finite number", "copy the adapter again")
    return config


def _check(raw: Mapping[str, Any]) -> None:
    """Refuse what would change the result and is not computed here."""
    kind = raw.get("peft_type")
    if kind != "LORA":
        raise WeightsError(f"{CONFIG_FILE} is of peft_type {kind!r} and LORA is served", "give a LoRA adapter")
    for key, hint in UNSUPPORTED.items():
        if raw.get(key):
            raise WeightsError(f"{CONFIG_FILE} has {key}, which is not supported", hint)
    if raw.get("bias", "none") != "none":
        raise WeightsError(f"{CONFIG_FILE} has bias {raw['bias']!r} and none is supported", 'train with bias="none"')
    initial = raw.get("init_lora_weights", True)
    if initial not in INITIAL:
        raise WeightsError(f"{CONFIG_FILE} has init_lora_weights {initial!r}, which changes the model", CONVERTIBLE)
    known = {*LoraConfig.__struct_fields__, *HARMLESS, *UNSUPPORTED}
    for key, value in raw.items():
        if key not in known and value:
            raise WeightsError(f"{CONFIG_FILE} has {key[:80]!r}, which is not known here", nearest(key, known))


def _check_patterns(key: str, patterns: Mapping[str, object]) -> None:
    """Keys of patterns may be expressions, which could take for ever; those that are written in practice are names."""
    if len(patterns) > MAX_PATTERNS:
        raise WeightsError(f"{CONFIG_FILE} has {len(patterns)} entries in {key}, at most {MAX_PATTERNS} are read")
    for pattern in patterns:
        if not re.fullmatch(r"\^?[\w.\-]{1,512}", pattern):
            raise WeightsError(
                f"{CONFIG_FILE} has {pattern[:80]!r} in {key}, an expression, and names or ends of names are read",
                "write each module's name in its place",
            )


def _by_pattern(patterns: Mapping[str, T], module: str, otherwise: T) -> T:
    """The value of the first pattern that fits."""
    for pattern, value in patterns.items():
        end = text_name(pattern.removeprefix("^"))
        if module == end or (end == pattern and module.endswith(f".{end}")):
            return value
    return otherwise
