"""`EngineOptions`: what to run and how, read from a model's folder and from the caller's own choices."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import msgspec

from tllm.cluster.heartbeat import SILENCE_SECONDS, check_lost_after
from tllm.cluster.settings import OUR_LINKS, Narrowing, Wiring
from tllm.core.errors import ConfigError, nearest
from tllm.hub.locate import locate
from tllm.hub.repository import HubWeights
from tllm.node.topology.numa_binding import NumaBinding, check_numa_binding
from tllm.node.weights.whole_files import put_together
from tllm.planner.cost.cache_room import CACHE_DIR_BYTES, MAX_NUM_SEQS, PAGE_SIZE, check_counts, context_of
from tllm.planner.cost.rank_bytes import ITEM_BYTES
from tllm.server.pooling.pooler_config import ModelPooling, PoolerConfig, model_pooling, read_pooler_config
from tllm.spec.families import spec_from_config
from tllm.spec.hf_config import read_config
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan
from tllm.spec.quantized.cache_form import KVCacheDtype
from tllm.spec.quantized.weight_form import Quantize, with_weight_form
from tllm.spec.speculative_config import SpeculativeConfig, read_speculative_config
from tllm.text.generation_config import NO_DEFAULTS, OWN, GenerationConfig, read_generation_config
from tllm.text.same_vocabulary import check_same_vocabulary

if TYPE_CHECKING:
    from tllm.engine.schedule.limits import EngineConfig


log = logging.getLogger("tllm.model")


class EngineArgs(TypedDict, total=False):
    """Keyword arguments of an engine; what is left out follows from the model and the machine."""

    dtype: str | None
    """Of weights and cache: float32, bfloat16, float16 or float64 (the checkpoint's own)."""
    quantize: Quantize | None
    """Round plain weights to int8 or int4 (groups of 32) while they are loaded."""
    dequantize: bool
    """Hold weights of few bits as plain numbers of `dtype`, for products without rounding of activations."""
    max_model_len: int | None
    """The longest sequence, prompt and reply together, in tokens (the model's own)."""
    max_num_seqs: int
    """Sequences that are computed together at the most."""
    kv_cache_memory: int | None
    """Bytes for keys and values on the rank that needs most of them (the planner's own figure)."""
    kv_cache_dtype: KVCacheDtype
    """Keys and values in one byte each, int8 or fp8, with a scale for each head and token (auto: in `dtype`)."""
    page_size: int
    """Tokens in one page of the cache."""
    num_speculative_tokens: int
    """Draft tokens of a sequence that one step checks at the most; 0 for none. The reply is the same."""
    speculative_config: str | Mapping[str, Any] | SpeculativeConfig | None
    """Instead of it, as JSON or a dict: `num_speculative_tokens`, and the folder of a small `model` that drafts."""
    enable_prefix_caching: bool
    """Keep pages of the cache for prompts that begin alike (yes; never for dynamic rope or gated delta nets)."""
    cache_dir: str
    """Folder in which such pages are kept on disk too, so that chats go on after a restart (none)."""
    cache_dir_size: int
    """Bytes of pages in that folder, on each machine, at the most."""
    threads: int | None
    """Threads of each worker (cores / workers on this machine)."""
    numa_binding: NumaBinding
    """Processors of each worker here: exclusive, node, none, or auto: exclusive where there are several NUMA nodes."""
    memory: int | None
    """Bytes of this machine, or on a device of each worker's, that its workers may use together (all)."""
    device: str
    """What to compute on here: auto, cpu, cuda, cuda:1 or xpu; without a number each worker has its own (cpu)."""
    allow_mixed: bool
    """Let nodes join that run another version of this program."""
    narrow_wire: Narrowing
    """Hidden states between machines in fewer bytes, which changes numbers: off, bf16, int8 or auto."""
    lost_after: float
    """Seconds of silence after which a node is given up."""
    wiring: Wiring
    """What carries tensors between processes."""
    pooler_config: str | Mapping[str, Any] | PoolerConfig | None
    """How embeddings and scores are made: `pooling_type`, `normalize`, `score_type`, as JSON or a dict."""
    generation_config: str
    """How tokens are chosen where nobody says: auto (as the model's folder says), vllm (as always), or a folder."""
    override_generation_config: str | Mapping[str, Any] | None
    """What counts before that, as JSON or a dict: `{"temperature": 0.6, "top_p": 0.95}`."""
    revision: str | None
    """Branch, tag or commit of a model that is given by its name on the Hugging Face hub (main)."""


@dataclass(frozen=True)
class EngineOptions:
    """The model, its plan, the room for sequences, and when a node is given up. `EngineArgs` says what each field is.

    `asked_model_len` is the longest sequence that was asked for, None for the model's own. `hub` are weights that are
    not in `folder`, and that each node fetches for itself.
    """

    folder: Path
    spec: ModelSpec
    plan: Plan
    dtype: str
    threads: int | None
    page_size: int
    kv_cache_memory: int | None
    asked_model_len: int | None
    max_num_seqs: int
    num_speculative_tokens: int = 0
    speculative_config: SpeculativeConfig | None = None
    quantize: Quantize | None = None
    dequantize: bool = False
    enable_prefix_caching: bool = True
    kv_cache_dtype: str = "auto"
    cache_dir: str = ""
    cache_dir_size: int = CACHE_DIR_BYTES
    allow_mixed: bool = False
    narrow_wire: Narrowing = "off"
    lost_after: float = SILENCE_SECONDS
    wiring: Wiring = OUR_LINKS
    memory: int | None = None
    numa_binding: NumaBinding = "auto"
    device: str = "cpu"
    hub: HubWeights | None = None
    pooler_config: PoolerConfig | None = None
    generation_config: GenerationConfig = NO_DEFAULTS

    @property
    def max_model_len(self) -> int:
        """The longest sequence in tokens: what was asked for, else what the model was made for."""
        return context_of(self.spec, self.asked_model_len)

    def pooling(self) -> ModelPooling:
        """How prompts become embeddings and scores. ConfigError for what the folder asks for and is not done here,
        WeightsError where it lacks the layers that embeddings go through."""
        from tllm.node.serve.dense_layers import check_dense  # which loads torch

        pooling = model_pooling(self.folder, self.spec, read_config(self.folder), self.pooler_config)
        check_dense(self.folder)
        return pooling


ELSEWHERE = {
    "tensor_parallel_size": 'give plan="tp=N"',
    "pipeline_parallel_size": 'give plan="pp=N"',
    "data_parallel_size": "each LLM is one copy of a model: make several",
    "gpu_memory_utilization": "kv_cache_memory says the bytes of the cache, memory those of a machine or device",
    "trust_remote_code": "leave it out: no code of a model is ever run",
    "quantization": "leave it out: what the files say is done; quantize rounds plain weights",
    "max_num_batched_tokens": "leave it out: it follows from the model",
    "enforce_eager": "leave it out: replies are the same either way",
    "tensor_split": 'shares of a plan say it: plan="tp=1+1,shares=1:3"',
    "n_ctx": "give max_model_len",
    "n_gpu_layers": 'give device="cuda"',
    "device_map": 'a plan says which rank holds what: plan="pp=2"',
    "torch_dtype": "give dtype",
    "load_in_8bit": 'give quantize="int8"',
    "load_in_4bit": 'give quantize="int4"',
}
"""Keyword arguments of vLLM, llama-cpp-python and transformers, and what is given here."""


OF_LLM = ("plan", "on_progress", "enable_lora", "max_loras", "max_lora_rank")
"""Keyword arguments of `LLM` that are no engine's."""


def check_names(args: Mapping[str, Any]) -> None:
    """ConfigError for a keyword argument that there is none of: one that is passed over would do nothing in silence."""
    for name in args.keys() - EngineArgs.__annotations__.keys():
        hint = ELSEWHERE.get(name) or nearest(name, (*EngineArgs.__annotations__, *OF_LLM))
        raise ConfigError(f"there is no keyword argument {name!r}", hint)


def engine_options(model: Path | str, plan: str = "pp=1", **args: Unpack[EngineArgs]) -> EngineOptions:
    """Read `config.json` and the plan. Every fault in them, or in `args`, is raised here, before anything is started.

    `model` is a path or a name; what a name stands for is fetched where it is not on this disk. Raises ConfigError,
    ModelError or PlanError, and for a name also AuthError, WeightsError or CapacityError.
    """
    model = located(model, args.get("revision"))
    spec = read_spec(model, args.get("quantize"), args.get("dequantize", False))
    dtype = args.get("dtype") or spec.dtype
    if dtype not in ITEM_BYTES:
        raise ConfigError(f"the dtype {dtype!r} cannot be computed with", f"give --dtype: {', '.join(ITEM_BYTES)}")
    check_numa_binding(args.get("numa_binding", "auto"))
    check_counts(threads=args.get("threads"), memory=args.get("memory"), kv_cache_memory=args.get("kv_cache_memory"))
    lost_after = args.get("lost_after", SILENCE_SECONDS)
    check_lost_after(lost_after)
    asked_model_len = args.get("max_model_len")
    context_of(spec, asked_model_len)  # which raises for more than there is
    drafts = draft_options(model, spec, args.get("speculative_config"), args.get("num_speculative_tokens", 0))
    options = EngineOptions(
        folder=model,
        spec=spec,
        plan=Plan.parse(plan, spec.num_layers),
        dtype=dtype,
        threads=args.get("threads"),
        page_size=args.get("page_size", PAGE_SIZE),
        kv_cache_memory=args.get("kv_cache_memory"),
        asked_model_len=asked_model_len,
        max_num_seqs=args.get("max_num_seqs", MAX_NUM_SEQS),
        num_speculative_tokens=drafts.num_speculative_tokens if drafts else args.get("num_speculative_tokens", 0),
        speculative_config=drafts,
        quantize=args.get("quantize"),
        dequantize=args.get("dequantize", False),
        enable_prefix_caching=args.get("enable_prefix_caching", True),
        kv_cache_dtype=args.get("kv_cache_dtype", "auto"),
        cache_dir=args.get("cache_dir", ""),
        cache_dir_size=args.get("cache_dir_size", CACHE_DIR_BYTES),
        allow_mixed=args.get("allow_mixed", False),
        numa_binding=args.get("numa_binding", "auto"),
        narrow_wire=args.get("narrow_wire", "off"),
        lost_after=lost_after,
        wiring=args.get("wiring", OUR_LINKS),
        memory=args.get("memory"),
        device=args.get("device", "cpu"),
        pooler_config=read_pooler_config(args.get("pooler_config")),
        generation_config=read_generation_config(
            model, args.get("generation_config", OWN), args.get("override_generation_config")
        ),
    )
    engine_config(options).check()
    return options


def check_device(device: str, place: int = 0) -> None:
    """ConfigError for a `device` that is not here for the process at this place, before a model is fetched for it."""
    if device == "cpu":
        return
    from tllm.devices.choose import choose_device

    choose_device(device, place)


def draft_options(
    folder: Path, spec: ModelSpec, given: str | Mapping[str, Any] | SpeculativeConfig | None, tokens: int = 0
) -> SpeculativeConfig | None:
    """Who drafts, checked against the model in `folder`; `tokens` is what `num_speculative_tokens` says beside it.

    ConfigError where the draft model has other tokens than the model.
    """
    if given is None:
        return None
    config = read_speculative_config(given)
    if config.model:
        config = msgspec.structs.replace(config, model=str(located(config.model)))
    if tokens not in (0, config.num_speculative_tokens):
        raise ConfigError(
            f"num_speculative_tokens is {tokens}, and speculative_config says {config.num_speculative_tokens}",
            "give one of them",
        )
    drafts = config.draft_spec()
    if drafts is not None and config.folder is not None:
        check_same_vocabulary(folder, config.folder, spec.vocab_size, drafts.vocab_size)
        return msgspec.structs.replace(config, model=str(config.folder.resolve()))
    return config


def located(model: Path | str, revision: str | None = None) -> Path:
    """Where all of a model is, by its path or name, fetched where it is not on this disk; what was found is logged."""
    found = locate(str(model), "whole", revision, put_together)
    if found.said:
        log.info("%s", found.said)
    return found.path


def read_spec(folder: Path, quantize: Quantize | None = None, dequantize: bool = False) -> ModelSpec:
    """The model's spec from its folder, or from a `config.json` alone, with its weights held as asked.

    ConfigError where there is neither, or where weights of few bits are to be rounded once more.
    """
    if not folder.is_dir() and not folder.is_file():
        raise ConfigError(
            f"{folder} is not a folder or a GGUF file",
            "give the folder of a Hugging Face model, with its config.json, or a GGUF file",
        )
    return spec_from_config(with_weight_form(read_config(folder), quantize, dequantize))


def engine_config(options: EngineOptions) -> EngineConfig:
    """The engine's sizes."""
    from tllm.engine.schedule.limits import EngineConfig

    return EngineConfig(
        dtype=options.dtype,
        quantize=options.quantize,
        dequantize=options.dequantize,
        max_model_len=options.asked_model_len,
        cache_bytes=options.kv_cache_memory,
        page_size=options.page_size,
        max_num_seqs=options.max_num_seqs,
        num_speculative_tokens=options.num_speculative_tokens,
        speculative_config=options.speculative_config,
        enable_prefix_caching=options.enable_prefix_caching,
        kv_cache_dtype=options.kv_cache_dtype,
        cache_dir=options.cache_dir,
        cache_dir_size=options.cache_dir_size,
        narrow_wire=options.narrow_wire,
        wiring=options.wiring,
    )
