"""Reads `quantization_config` of a `config.json`: which weights the files keep in few bits, and how. No torch.

A setting that is not known, or that no reader handles, is an error that names it: read wrongly, it would give text that
is wrong in silence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from tllm.core.errors import ModelError
from tllm.spec.quantized.weight_bits import EMBEDDING, HEAD, LAYERS, Coding, Quantization

Rules = list[tuple[str, Coding | None]]

PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head": "lm_head",
}
"""What the text part's names begin with in multimodal checkpoints -> what they begin with in a text model's."""

WITH_ZEROS = 64
"""Bits of a group's scale and minimum where files have a zero: both are float32 in memory."""

PATTERN_LIMIT = 1000
"""Letters of a pattern that is taken from a file."""


class _Settings:
    """The keys of a `quantization_config`, or of a part of it; `check_all_read` names one that nobody asked for."""

    def __init__(self, raw: object, where: str = "quantization_config") -> None:
        if not isinstance(raw, dict):
            raise ModelError(f"{where} is {str(raw)[:60]!r} and not a table of settings", "copy config.json again")
        self.raw, self.where = raw, where
        self._read: set[str] = set()

    def get(self, key: str) -> Any:
        self._read.add(key)
        return self.raw.get(key)

    def one_of(self, key: str, known: tuple[Any, ...], default: Any = None) -> Any:
        """A value that must be one of the known ones."""
        value = self.get(key)
        value = default if value is None else value
        if not any(value == other and type(value) is type(other) for other in known):
            self.refuse(key, value, "one of " + ", ".join(map(str, known)) + " is read")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        return bool(self.one_of(key, (True, False), default))

    def group(self, default: int | None = None) -> int:
        """Columns of a group; 0 for all of a row, which files write as -1."""
        value = self.get("group_size")
        value = default if value is None else value
        if type(value) is not int or not (value == -1 or 0 < value < 1 << 31):
            self.refuse("group_size", value, "a number of columns, or -1 for all of a row, is read")
        return max(0, value)

    def names(self, *keys: str) -> list[str]:
        """A list of names or patterns; of several keys, all."""
        found: list[str] = []
        for key in keys:
            value = self.get(key) or []
            if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
                self.refuse(key, value, "a list of names is read")
            found += value
        return found

    def ignore(self, *keys: str) -> None:
        """Keys that say how the numbers were found or how fast they run, not what they are."""
        self._read.update(keys)

    def check_all_read(self) -> None:
        for key, value in self.raw.items():
            if key not in self._read and value not in (None, False, [], {}):
                self.refuse(key, value, "it is not known here", "it may change the numbers; if it does not, remove it")

    def refuse(self, key: str, value: object, why: str, hint: str = "") -> NoReturn:
        raise ModelError(
            f"{self.where}: {key} is {repr(value)[:60]}, and {why}",
            hint or "give another quantisation of the model, or its plain folder with --quantize",
        )


def read_quantization(config: Mapping[str, Any]) -> Quantization | None:
    """What a `config.json` says of its weights; None where they are plain. ModelError for what cannot be read."""
    raw, where = config.get("quantization_config"), "quantization_config"
    if not raw:
        raw, where = config.get("quantization"), "quantization"
    if not raw:
        return None
    settings = _Settings(raw, where)
    method = settings.get("quant_method")
    if method is None and "bits" in settings.raw and "group_size" in settings.raw:
        method = "mlx"  # whose files do not name it
    if not isinstance(method, str) or method not in METHODS:
        settings.refuse("quant_method", method, "these are read: " + ", ".join(METHODS))
    rules = METHODS[method](settings)
    settings.check_all_read()
    return Quantization(method, tuple(rules))


HOW_FOUND = (
    "damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "model_name_or_path", "method", "meta",
    "model_file_base_name", "quantizer", "tokenizer", "dataset", "backend", "use_cuda_fp16", "use_exllama", "gptaq",
    "exllama_config", "disable_exllama", "max_input_length", "model_seqlen", "block_name_to_quantize", "batch_size",
    "module_name_preceding_first_block", "pad_token_id", "cache_block_outputs", "modules_in_block_to_quantize",
    "act_group_aware", "hyb_act", "mse", "fail_safe", "cache_examples_on_gpu", "pack_impl", "offload_to_disk",
    "offload_to_disk_path", "do_fuse", "fuse_max_seq_len", "modules_to_fuse",
)  # fmt: skip
"""Keys of AWQ and GPTQ folders that do not change what the files mean."""


def _awq(settings: _Settings) -> Rules:
    bits = settings.one_of("bits", (4,), settings.raw.get("w_bit", 4))
    settings.one_of("version", ("gemm", "GEMM"), settings.raw.get("format", "gemm"))
    settings.one_of("zero_point", (True,), True)
    coding = Coding(bits, settings.group(settings.raw.get("q_group_size", 128)), symmetric=False, beside=WITH_ZEROS)
    settings.one_of("desc_act", (False,), False)
    settings.one_of("pack_dtype", ("int32",), "int32")
    settings.ignore("w_bit", "q_group_size", "format", "sym", *HOW_FOUND)
    return [*_kept(settings.names("modules_to_not_convert")), (LAYERS, coding)]


def _gptq(settings: _Settings) -> Rules:
    stored = str(settings.get("checkpoint_format") or settings.get("format") or "gptq")
    settings.ignore("format")
    if stored not in ("gptq", "gptq_v2"):
        settings.refuse("checkpoint_format", stored, "one of gptq, gptq_v2 is read")
    settings.one_of("is_marlin_format", (False,), False)
    settings.one_of("pack_dtype", ("int32",), "int32")
    settings.ignore(*HOW_FOUND)
    coding = _gptq_coding(settings, {}, stored)
    rules: Rules = []
    dynamic = settings.get("dynamic") or {}
    for pattern, changes in _Settings(dynamic, "quantization_config: dynamic").raw.items():
        skip = pattern.startswith("-:")
        expression = _pattern(settings, pattern.removeprefix("-:").removeprefix("+:"))
        part = _Settings(changes or {}, f"quantization_config: dynamic: {pattern!r}")
        rules.append((expression, None if skip else _gptq_coding(part, settings.raw, stored)))
        part.check_all_read()
    rules += _kept(settings.names("modules_to_not_convert"))
    return [*rules, (LAYERS, coding), *([(HEAD, coding)] if settings.flag("lm_head") else [])]


def _gptq_coding(settings: _Settings, base: Mapping[str, Any], stored: str) -> Coding:
    """Of all modules, or of those that `dynamic` gives other settings than the `base`."""
    symmetric = settings.flag("sym", bool(base.get("sym", True)))
    return Coding(
        settings.one_of("bits", (4, 8), base.get("bits")),
        settings.group(base.get("group_size", 128)),
        symmetric=symmetric,
        beside=16 if symmetric else WITH_ZEROS,
        scattered=settings.flag("desc_act", bool(base.get("desc_act", False))),
        zero_offset=0 if stored == "gptq_v2" else 1,
    )


PACKED, INTEGER, FLOAT, NAIVE = "pack-quantized", "int-quantized", "float-quantized", "naive-quantized"


def _compressed_tensors(settings: _Settings) -> Rules:
    """Activations that are to be quantised too are computed with as they are, and so are keys and values."""
    settings.ignore("quantization_status", "global_compression_ratio", "version", "kv_cache_scheme")
    _Settings(settings.get("sparsity_config") or {}, "quantization_config: sparsity_config").one_of(
        "format", ("dense",), "dense"
    )
    formats = (PACKED, INTEGER, FLOAT, NAIVE, "mixed-precision")
    settings.one_of("format", formats)
    exact: Rules = []
    patterns: Rules = []
    every: Rules = []
    groups = _Settings(settings.get("config_groups"), "quantization_config: config_groups")
    for name, raw in groups.raw.items():
        group = _Settings(raw, f"quantization_config: {name}")
        group.ignore("input_activations", "output_activations")
        group.one_of("format", formats, PACKED)
        coding = _compressed_coding(_Settings(group.get("weights"), f"quantization_config: {name}: weights"))
        for target in group.names("targets"):
            rules = every if target == "Linear" else patterns if target.startswith("re:") else exact
            rules.append((_target(group, target), coding))
        group.check_all_read()
    ignored: Rules = [(_target(settings, name), None) for name in settings.names("ignore")]
    return [*ignored, *exact, *patterns, *every]


def _target(settings: _Settings, target: str) -> str:
    if target == "Linear":
        return f"{LAYERS}|{HEAD}"  # an embedding is none
    return _pattern(settings, target[3:]) if target.startswith("re:") else re.escape(text_name(target))


def _compressed_coding(weights: _Settings) -> Coding:
    number = weights.one_of("type", ("int", "float"), "int")
    bits = weights.one_of("num_bits", (4, 8) if number == "int" else (8,), 8)
    scope = weights.get("strategy")
    if scope is None:
        scope = {None: "tensor", -1: "channel"}.get(weights.raw.get("group_size"), "group")
    if scope not in ("tensor", "channel", "group", "block"):
        weights.refuse("strategy", scope, "one of tensor, channel, group, block is read")
    group, rows = 0, 0 if scope == "tensor" else 1
    weights.ignore("group_size", "block_structure", "observer", "observer_kwargs", "scale_dtype", "zp_dtype")
    if scope == "group":
        group = weights.group()
    if scope == "block":
        rows, group = _block(weights, "block_structure")
    symmetric = weights.flag("symmetric", True)
    weights.one_of("dynamic", (False,), False)
    order = weights.get("actorder")
    if order not in (None, True, False, "weight", "static", "group", "dynamic"):
        weights.refuse("actorder", order, "one of weight, static, group, dynamic is read")
    weights.check_all_read()
    return Coding(
        bits,
        group,
        rows=rows,
        symmetric=symmetric,
        number="float" if number == "float" else "integer",
        beside=16 if symmetric else WITH_ZEROS,
        scattered=order in (True, "group", "dynamic"),
    )


def _fp8(settings: _Settings) -> Rules:
    settings.ignore("activation_scheme", "dequantize", "scale_fmt", "modules_to_convert")
    settings.one_of("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    settings.one_of("expert_dtype", ("fp8",), "fp8")
    rows, group = _block(settings, "weight_block_size") if settings.get("weight_block_size") is not None else (0, 0)
    coding = Coding(8, group, rows=rows, number="float", beside=32)
    return [*_kept(settings.names("modules_to_not_convert", "ignored_layers")), (LAYERS, coding)]


def _mxfp4(settings: _Settings) -> Rules:
    settings.ignore("dequantize")
    kept = _kept(settings.names("modules_to_not_convert"))
    return [*kept, (r"model\.layers\.\d+\.mlp\.experts(\..*)?", Coding(4, 32, beside=8))]


def _mlx(settings: _Settings) -> Rules:
    """Every linear and table, unless a module's own entry says otherwise."""
    settings.ignore("quant_method")
    base = _mlx_coding(settings)
    rules: Rules = []
    for key, value in settings.raw.items():
        if "." in key or key == HEAD:
            settings.ignore(key)
            coding = base if value is True else None
            if value not in (True, False):
                part = _Settings(value, f"{settings.where}: {key}")
                coding = _mlx_coding(part)
                part.check_all_read()
            rules.append((re.escape(text_name(key)), coding))
    return [*rules, (LAYERS, base), (EMBEDDING, base), (HEAD, base)]


def _mlx_coding(settings: _Settings) -> Coding:
    settings.one_of("mode", ("affine",), "affine")
    return Coding(settings.one_of("bits", (4, 8)), settings.group(), symmetric=False, beside=32)


METHODS: dict[str, Callable[[_Settings], Rules]] = {
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "mlx": _mlx,
}
"""The readers of `quantization_config`, by its `quant_method`."""


def _block(settings: _Settings, key: str) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    value = settings.get(key)
    if not isinstance(value, list) or len(value) != 2 or not all(type(n) is int and 0 < n < 1 << 31 for n in value):
        settings.refuse(key, value, "a list of rows and columns is read")
    return value[0], value[1]


def _kept(names: list[str]) -> Rules:
    """Modules that are not converted: given by a name, its beginning or its end up to a dot."""
    return [(rf"{re.escape(name)}(\..*)?|.*{re.escape(name)}", None) for name in map(text_name, names)]


def text_name(name: str) -> str:
    """A tensor's or module's name in a text model, of the one that it has in a multimodal checkpoint."""
    for prefix, plain in PREFIXES.items():
        if name.startswith(prefix):
            return plain + name.removeprefix(prefix)
    return name


def _pattern(settings: _Settings, expression: str) -> str:
    """A pattern of a file, which a name must begin with, as one of the whole name."""
    if len(expression) > PATTERN_LIMIT:
        settings.refuse("a pattern", expression, f"it has {len(expression)} letters of at most {PATTERN_LIMIT}")
    try:
        re.compile(expression)
    except re.error as error:
        settings.refuse("a pattern", expression, f"it is none ({error})", "copy config.json again")
    return f"(?:{expression}).*"
