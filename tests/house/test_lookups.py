"""Where is X? A name that papers or other projects use leads to its file: a search of names alone finds it.

The terms come from the literature and from other projects' documentation, not from our code. A search finds a file
when the words of the term, joined or with separators, are in the file's path below src/tllm, or in the name of one of
its classes.
"""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

from tests.house.tree import SOURCE, nodes, parse, sources

LOOK_UPS = {
    # Serving: Orca (Yu et al. 2022), vLLM (Kwon et al. 2023), SARATHI (Agrawal et al. 2024).
    "scheduler": "engine/schedule/scheduler.py",
    "paged attention": "engine/compute/paged_attention.py",
    "KV cache": "engine/compute/kv_cache.py",
    "page table": "engine/pages/page_table.py",
    "prefix cache": "engine/schedule/prefix_cache.py",
    "n-gram draft": "engine/schedule/ngram_draft.py",
    "draft model": "engine/draft/draft_model.py",
    "speculative decoding": "engine/schedule/speculative_decoding.py",
    "sampler": "engine/compute/sampler.py",
    "sampling params": "spec/request.py",
    "detokenizer": "text/detokenizer.py",
    "chat template": "text/chat_template.py",
    "GGUF header": "core/gguf_header.py",
    "GGUF blocks": "weights/formats/gguf_blocks.py",
    "stop strings": "text/stop_strings.py",
    "SSE": "server/http/sse.py",
    # The model: Vaswani et al. 2017, Su et al. 2021, Zhang and Sennrich 2019, Shazeer et al. 2017.
    "RoPE": "model/rope.py",
    "RMSNorm": "model/norm.py",
    "MoE": "model/moe.py",
    "cross entropy": "parallel/cross_entropy.py",
    # Parallelism: Megatron-LM, GPipe, PipeDream, zero bubble, ring attention, ZeRO, GShard.
    "column linear": "parallel/linear.py",
    "sequence parallel": "parallel/sequence_parallel.py",
    "context parallel": "training/attention/context_parallel.py",
    "ring attention": "training/attention/ring_attention.py",
    "expert dispatch": "parallel/expert_dispatch.py",
    "load balance": "parallel/load_balance.py",
    "pipeline schedule": "spec/pipeline_schedule.py",
    "recompute": "training/step/recompute.py",
    "ZeRO-3": "training/optim/zero3.py",
    # Training: Loshchilov and Hutter 2019, Seide et al. 2014, Vogels et al. 2019, Douillard et al. 2023.
    "AdamW": "training/optim/optimizer.py",
    "lr schedule": "training/job/lr_schedule.py",
    "gradient clipping": "training/gradients/gradient_clipping.py",
    "gradient bucket": "training/gradients/gradient_buckets.py",
    "error feedback": "training/gradients/error_feedback.py",
    "PowerSGD": "training/gradients/powersgd.py",
    "DiLoCo": "training/sync/diloco.py",
    "parameter server": "training/parameter_server/server.py",
    "packing": "training/data/packing.py",
    "chat labels": "training/data/chat_labels.py",
    "optimizer offload": "training/state/optimizer_offload.py",
    # Checkpoints and faults: CheckFreq (Mohan et al. 2021), Gemini (Wang et al. 2023), Bamboo (Thorpe et al. 2023).
    "async save": "training/checkpoint/async_saves.py",
    "checkpoint shard": "training/checkpoint/shard_writer.py",
    "memory snapshot": "training/snapshot/memory_snapshot.py",
    "heartbeat": "cluster/heartbeat.py",
    "recovery": "node/recovery/recovery.py",
    # Consensus: Ongaro and Ousterhout 2014, Ongaro 2014.
    "raft": "cluster/consensus/raft.py",
    "raft log": "cluster/consensus/raft_log.py",
    "append entries": "cluster/consensus/raft_messages.py",
    "takeover": "node/serve/takeover.py",
    # Communication: Thakur, Rabenseifner and Gropp 2005; torch.distributed.
    "all-reduce": "comm/collectives/all_reduce.py",
    "rendezvous": "comm/c10d/rendezvous.py",
    "handshake": "comm/links/handshake.py",
    "join token": "cluster/join_token.py",
    # Planning: Alpa (Zheng et al. 2022).
    "branch and bound": "planner/search/branch_and_bound.py",
    "flops": "planner/cost/flops.py",
}
MOST_HITS = 12
"""A search that finds more files than a screen shows leads nowhere."""

FIRST_NAME = re.compile(r"^`([A-Z]\w*)`")
"""Of a docstring that begins with the name of a class."""


def words_of(name: str) -> list[str]:
    """The words of a path, or of a snake_case or CamelCase name, in lower case: `KVCache` is kv, cache."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+", name)]


def holds(name: str, word: str) -> bool:
    """Whether whole words of a name, written together, are this word or its plural."""
    plain = re.sub(r"[^a-z0-9]", "", word.lower())
    return not joined(name).isdisjoint((plain, f"{plain}s"))


@functools.cache
def joined(name: str) -> frozenset[str]:
    """Every run of the words of a name, written together."""
    parts = words_of(name)
    return frozenset(
        "".join(parts[start:stop]) for start in range(len(parts)) for stop in range(start + 1, len(parts) + 1)
    )


@functools.cache
def names_of(path: Path) -> list[str]:
    """What a search of names sees of a file: its path, and its classes."""
    classes = [node.name for node in nodes(path) if isinstance(node, ast.ClassDef)]
    return [str(path.relative_to(SOURCE).with_suffix("")), *classes]


def hits(term: str) -> list[str]:
    """Files that a search for the term finds: one of their names holds each of its words."""
    return [
        str(path.relative_to(SOURCE))
        for path in sources()
        if path.stat().st_size and any(all(holds(name, word) for word in term.split()) for name in names_of(path))
    ]


def _assigned(path: Path) -> set[str]:
    """Names that a file gives a value, as a union of classes has one."""
    return {node.id for node in nodes(path) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def test_there_are_at_least_forty() -> None:
    assert len(LOOK_UPS) >= 40


@pytest.mark.parametrize("term", LOOK_UPS)
def test_a_term_of_the_field_leads_to_its_file(term: str) -> None:
    files = hits(term)
    assert LOOK_UPS[term] in files, f"a search for {term!r} finds {files}"
    assert len(files) <= MOST_HITS, f"a search for {term!r} finds {len(files)} files: {files}"


def test_a_file_that_names_its_class_first_has_it() -> None:
    """The line that a reader begins with must not name what was renamed, or moved to another file."""
    faults = []
    for path in sources():
        first = (ast.get_docstring(parse(path)) or "").partition("\n")[0]
        own = {node.name for node in nodes(path) if isinstance(node, ast.ClassDef)} | _assigned(path)
        faults += [f"{path.relative_to(SOURCE)}: {name}" for name in FIRST_NAME.findall(first) if name not in own]
    assert not faults, "named in the first line of a docstring, and not there:\n" + "\n".join(faults)


def test_a_search_can_find_nothing() -> None:
    assert hits("pickle jar") == []
