"""How tokens are chosen where a request does not say: what the model's publisher recommends, or whoever serves it.

That is what `generation_config.json` of a model's folder says, in the names of transformers' `GenerationConfig`, or the
header of a GGUF file. The two options have vLLM's names: `--generation-config` says what is read ("auto": the model's
own, "vllm": nothing, or a folder), and `--override-generation-config` has values that count before those.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tllm.core.errors import UNREADABLE, ConfigError, nearest
from tllm.core.gguf_files import open_gguf
from tllm.core.model_folders import json_table

OWN = "auto"
NOTHING = "vllm"
"""The name that vLLM has for its own defaults, which are OpenAI's, and ours."""

FILE = "generation_config.json"
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""What is said of how one token is chosen, in the names of requests too."""

KEYS = (*SAMPLING, "max_new_tokens")

GREEDY_BELOW = 1e-5
"""A smaller temperature means the same as 0, as for vLLM: it could only choose among tokens whose logits are all but
equal."""

GGUF_KEYS = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}


class GenerationConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What requests take that leave these open; None is left to the interface.

    `max_new_tokens` is the most that any reply may have, as vLLM takes it. Other keys of the file say nothing of how a
    token is chosen here, but for `eos_token_id`, which is always read (`tokenizer.stop_ids`).
    """

    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 31)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=100.0)] | None = None
    max_new_tokens: Annotated[int, Meta(ge=1)] | None = None

    @property
    def given(self) -> dict[str, float]:
        """What it says, by name."""
        return {name: value for name in KEYS if (value := getattr(self, name)) is not None}

    def fill(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """How a token is chosen (`SAMPLING`): what is asked for, and where that is None what this says, if anything.
        Who asks for the likeliest tokens, with a temperature of 0, gets these: no penalty of a file changes them."""
        chosen = {name: asked.get(name) for name in SAMPLING}
        if chosen["temperature"] is None or effective_temperature(chosen["temperature"]) > 0:
            chosen = {name: getattr(self, name) if value is None else value for name, value in chosen.items()}
        if chosen["temperature"] is not None:
            chosen["temperature"] = effective_temperature(chosen["temperature"])
        return chosen


NO_DEFAULTS = GenerationConfig()


def sampling_values(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Of how a token is chosen (`SAMPLING`), what `SamplingParams` takes: left out is what nobody says."""
    said = {name: value for name in SAMPLING if (value := chosen.get(name)) is not None}
    if "temperature" in said:
        said["temperature"] = effective_temperature(said["temperature"])
    if "top_k" in said:
        said["top_k"] = max(0, said["top_k"])  # vLLM's -1: of all
    return said


def effective_temperature(temperature: float) -> float:
    """What the engine gets for a temperature: 0 where that means the same. One below 0 stays, to be refused."""
    return 0.0 if 0 <= temperature < GREEDY_BELOW else temperature


def read_generation_config(
    model: Path, source: str = OWN, override: str | Mapping[str, Any] | None = None
) -> GenerationConfig:
    """What counts for the model of a folder or a GGUF file. ConfigError for what cannot be, wherever it is written."""
    return msgspec.structs.replace(_of_source(model, source), **read_override(override).given)


def _of_source(model: Path, source: str) -> GenerationConfig:
    if source == NOTHING:
        return NO_DEFAULTS
    without = f"correct it, or let `serve`, `chat` and `generate` go without it: --generation-config {NOTHING}"
    gguf = open_gguf(model) if source == OWN else None
    if gguf is not None:
        found = {name: _short(gguf.metadata.get(key)) for name, key in GGUF_KEYS.items()}
        return _checked(str(model), found, without)
    file = (model if source == OWN else Path(source)) / FILE
    if file.is_file():
        return _checked(str(file), json_table(file, ConfigError), without)
    if source != OWN:
        raise ConfigError(f"--generation-config {source}: there is no {file}", f"give a folder, {OWN} or {NOTHING}")
    return NO_DEFAULTS


def read_override(given: str | Mapping[str, Any] | None) -> GenerationConfig:
    """What `--override-generation-config` says. ConfigError for what cannot be."""
    if given is None:
        return NO_DEFAULTS
    option, example = "--override-generation-config", """write '{"temperature": 0.6}'"""
    try:
        values = json.loads(given) if isinstance(given, str) else dict(given)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{option} is not JSON: {error}", example) from error
    if not isinstance(values, dict):
        raise ConfigError(f"{option} is not a JSON object", example)
    for key in values:
        if key not in KEYS:
            raise ConfigError(f"{option} has no key {key!r}", nearest(key, KEYS))
    return _checked(option, values, example)


def _checked(origin: str, values: Mapping[str, Any], hint: str) -> GenerationConfig:
    try:
        return msgspec.convert(values, GenerationConfig)
    except UNREADABLE as error:
        raise ConfigError(f"{origin}: {error}", hint) from error


def _short(value: Any) -> Any:
    """A file's float32 as it was written before: 0.95, not 0.949999988."""
    return round(value, 6) if isinstance(value, float) else value
