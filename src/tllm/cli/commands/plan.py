"""Show which rank would hold what, or choose the best plan for a cluster, before anything is loaded.

Only config.json is read, or a GGUF file's header. --json prints what --plan takes as a file. With --goal the plans for
the machines of --cluster (or --nodes, which join and are measured) are compared, and the best are shown with what they
would take; with --plan too, that plan alone. A job (JOB.toml) in the place of MODEL is planned with all its
roles: what it samples, its reference, its teacher.
"""

from __future__ import annotations

import argparse
from typing import Any

import msgspec

from tllm.api.engine_options import EngineOptions
from tllm.cli.arguments.model_argument import resolve_model
from tllm.cli.arguments.options import add_cache, add_model, add_weight_form, engine_options
from tllm.cli.display.tables import indented_json, span, table
from tllm.cli.display.tensor_modes import show_serving_modes
from tllm.cli.planning.best_plans import add_goal, choose
from tllm.cli.planning.job_plan import is_job, plan_job
from tllm.core.errors import ConfigError, counted
from tllm.core.gguf_files import open_gguf
from tllm.core.memory import amount
from tllm.planner.cost.cache_room import RUNTIME_BYTES, batch_tokens, cache_pages, working_bytes
from tllm.planner.cost.draft_bytes import DraftBytes, draft_bytes
from tllm.planner.cost.rank_bytes import ITEM_BYTES, RankBytes, rank_bytes
from tllm.planner.cost.weight_bits import mean_linear_bytes
from tllm.spec.quantized.cache_form import SCALE_BYTES

OF_CHOICE = ("goal", "cluster", "nodes", "local", "live", "keep", "explain", "svg")
"""Options that make no sense but where a plan is chosen, or predicted, for machines."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_weight_form(parser)
    add_cache(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_goal(parser)


def run(args: argparse.Namespace) -> int:
    if is_job(args.model):
        return plan_job(args)
    if args.set:
        raise ConfigError(
            f"--set {args.set[0]} changes a key of a job, and {args.model} is none", "give JOB.toml for it"
        )
    resolve_model(args, "config")
    if any(getattr(args, name) for name in OF_CHOICE):
        return choose(args)
    options = engine_options(args)
    ranks = rank_bytes(options.spec, options.plan, options.dtype, options.kv_cache_dtype)
    if args.json:
        print(indented_json(_as_json(options, ranks)))
    else:
        print(_as_text(options, ranks))
    return 0


def cache_tokens(options: EngineOptions, ranks: list[RankBytes]) -> int:
    """Tokens whose keys and values have room."""
    pages = cache_pages(ranks, options.page_size, options.max_model_len, options.max_num_seqs, options.kv_cache_memory)
    return pages * options.page_size


def beside(options: EngineOptions, rank: RankBytes) -> int:
    """Bytes of a worker beside weights and cache: its programs, and the largest batch under way."""
    batched = batch_tokens(options.spec, options.max_model_len)
    tokens = min(batched, options.max_model_len * options.max_num_seqs)
    return RUNTIME_BYTES + working_bytes(options.spec, rank, options.dtype, tokens, options.max_num_seqs)


def ranks_of(count: int) -> str:
    return counted(count, "rank")


def _as_text(options: EngineOptions, ranks: list[RankBytes]) -> str:
    spec, tokens = options.spec, cache_tokens(options, ranks)
    rows = [["rank", "stage", "layers", "share", "heads", "kv heads", "vocabulary", "weights", "cache", "work", "sum"]]
    for rank in ranks:
        stage = options.plan.stages[rank.stage]
        share = stage.shares[options.plan.place(rank.rank)[1]]
        cache = rank.kv_per_token * tokens
        rows.append(
            [
                str(rank.rank),
                str(rank.stage),
                span(rank.layers.start, rank.layers.stop),
                f"{share}/{sum(stage.shares)}",
                span(*rank.cut.heads),
                span(*rank.cut.kv_heads),
                span(*rank.cut.vocab) if rank.layers.start == 0 or rank.layers.stop == spec.num_layers else "",
                amount(rank.weights),
                amount(cache),
                amount(beside(options, rank)),
                amount(rank.weights + cache + beside(options, rank)),
            ]
        )
    weights = sum(rank.weights for rank in ranks)
    per_token = sum(rank.kv_per_token for rank in ranks)
    drafts = draft_model_bytes(options, tokens)
    head = [
        f"{spec.family}: {counted(spec.num_layers, 'layer')}, width {spec.hidden_size}, "
        f"{counted(spec.num_heads, 'head')}, "
        f"{counted(spec.num_kv_heads, 'kv head')}, vocabulary {spec.vocab_size}, {options.dtype}",
        f"plan {options.plan}: {ranks_of(options.plan.world_size)}, {amount(weights)} of weights{_in_bits(options)}",
        *_of_file(options),
        f"cache: {tokens} tokens in pages of {options.page_size}, {amount(per_token)} for each token over all ranks"
        f"{_in_codes(options)}",
        *_of_draft(drafts),
        "",
    ]
    batched = min(batch_tokens(spec, options.max_model_len), options.max_model_len)
    modes = show_serving_modes(spec, options.plan, options.dtype, batched)
    return "\n".join(head) + table(rows) + (f"\n\n{modes}" if modes else "")


def draft_model_bytes(options: EngineOptions, tokens: int) -> DraftBytes | None:
    """What a draft model takes of rank 0's memory, beside the ranks' own, for a cache of so many tokens."""
    drafts = None if options.speculative_config is None else options.speculative_config.draft_spec()
    if drafts is None:
        return None
    return draft_bytes(drafts, options.dtype, tokens // options.page_size, options.page_size)


def _of_draft(drafts: DraftBytes | None) -> list[str]:
    if drafts is None:
        return []
    return [f"draft model, on rank 0 too: {amount(drafts.weights)} of weights, {amount(drafts.cache)} of cache"]


def _in_bits(options: EngineOptions) -> str:
    """How the weights of the linears are held, where this is not in plain numbers."""
    if options.spec.quantization is None:
        return ""
    bits = 8 * mean_linear_bytes(options.spec, ITEM_BYTES[options.dtype])
    return f" ({options.spec.quantization.method}: {bits:.4g} bits a weight of the layers)"


def _in_codes(options: EngineOptions) -> str:
    """How keys and values are held, where this is not in the model's numbers."""
    if options.kv_cache_dtype == "auto":
        return ""
    return f" ({options.kv_cache_dtype}, with a scale of {SCALE_BYTES} bytes for each head's key and value)"


def _of_file(options: EngineOptions) -> list[str]:
    """What the weights of a GGUF file take in it, which is less than they take in memory."""
    gguf = open_gguf(options.folder)
    if gguf is None:
        return []
    sizes = gguf.bytes_by_type()
    types = ", ".join(f"{kind} {amount(nbytes)}" for kind, nbytes in sizes.items())
    return [f"file: {amount(sum(sizes.values()))} of weights: {types}"]


def _as_json(options: EngineOptions, ranks: list[RankBytes]) -> dict[str, Any]:
    tokens = cache_tokens(options, ranks)
    drafts = draft_model_bytes(options, tokens)
    return {
        **msgspec.to_builtins(options.plan),
        "plan": str(options.plan),
        "dtype": options.dtype,
        "quantization": None if options.spec.quantization is None else options.spec.quantization.method,
        "kv_cache_dtype": options.kv_cache_dtype,
        "page_size": options.page_size,
        "cache_tokens": tokens,
        **({} if drafts is None else {"draft_model": {"weight_bytes": drafts.weights, "kv_bytes": drafts.cache}}),
        "ranks": [
            {
                "rank": rank.rank,
                "stage": rank.stage,
                "layers": [rank.layers.start, rank.layers.stop],
                "share": options.plan.stages[rank.stage].shares[options.plan.place(rank.rank)[1]],
                "cut": {name: list(held) for name, held in vars(rank.cut).items()},
                "weight_bytes": rank.weights,
                "kv_bytes_per_token": rank.kv_per_token,
                "kv_bytes": rank.kv_per_token * tokens,
                "work_bytes": beside(options, rank),
                "sum_bytes": rank.weights + rank.kv_per_token * tokens + beside(options, rank),
            }
            for rank in ranks
        ],
    }
