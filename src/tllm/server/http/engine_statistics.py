"""What an engine may count (`EngineClient.stats`): under which name Prometheus has it, and what it is."""

from __future__ import annotations

GAUGES = {
    "running": ("vllm:num_requests_running", "Sequences being computed"),
    "waiting": ("vllm:num_requests_waiting", "Sequences waiting for their first step"),
    "plan_gain": ("tllm_plan_gain", "By what part of 1 another plan would serve faster, as machines are now"),
    "page_store_bytes": ("tllm_page_store_bytes", "Bytes of pages on the disk of the driver's rank"),
    "kv_usage": ("vllm:kv_cache_usage_perc", "Part of the KV pages in use, 0 to 1"),
}
COUNTERS = {
    "preemptions": ("vllm:num_preemptions", "Sequences set back for want of pages"),
    "drafts": ("vllm:spec_decode_num_drafts", "Times that drafted tokens of a sequence were checked"),
    "draft_tokens": ("vllm:spec_decode_num_draft_tokens", "Drafted tokens that were checked"),
    "accepted_tokens": ("vllm:spec_decode_num_accepted_tokens", "Drafted tokens that were right"),
    "prefix_queries": ("vllm:prefix_cache_queries", "Tokens of sequences that began, looked up in the prefix cache"),
    "prefix_hits": ("vllm:prefix_cache_hits", "Those of them that were found and not computed"),
    "external_prefix_queries": (
        "vllm:external_prefix_cache_queries",
        "Tokens of sequences that began and were not in the prefix cache, looked up on disk",
    ),
    "external_prefix_hits": ("vllm:external_prefix_cache_hits", "Those of them that were read from disk"),
    "page_store_written_bytes": ("tllm_page_store_written_bytes", "Bytes of pages that the driver's rank has written"),
    "page_store_read_bytes": ("tllm_page_store_read_bytes", "Bytes of pages that the driver's rank has read"),
    "page_store_damaged": ("tllm_page_store_damaged", "Files of pages that were not whole, and were deleted"),
    "page_store_refused": ("tllm_page_store_refused", "Files of pages that the disk did not take"),
    "refused_links": ("tllm_refused_links", "Connections that were shown out, at the control port and at any node's"),
    "refused_frames": ("tllm_refused_frames", "Frames and messages that are not what the plan says, on any wire"),
}
"""By the engine's key: the name that is exported, which existing dashboards ask for, and the meaning."""

MEANINGS = {
    "batches": "Batches that the driver's stage has computed",
    "batches_in_flight": "Batches that are on their way round the ring",
    "turns": "Turns of the ring in which one batch of replies was alone on its way",
    "turn_seconds": "Seconds that these turns took together",
    "draft_model_steps": "Steps of a draft model, each of which gives every sequence that drafts one token",
    "draft_model_seconds": "What a draft model has taken",
    "draft_right": "Drafted tokens that were right, those counted too that were looked up and not checked",
    "draft_wrong": "Drafted tokens that were wrong, those counted too that were looked up and not checked",
    "reply_batches": "Batches in which every sequence got its next token (no prompts)",
    "reply_sequences": "Sequences in these batches, summed",
    "reply_rows": "Rows (tokens computed) in these batches, summed",
    "reply_keys": "Tokens of these sequences up to the batch (keys to attend to), summed",
    "compute_seconds": "Seconds that the driver's rank computed, for prompts too, without what its collectives took",
    "reply_seconds": "Seconds that the driver's rank computed these batches, its sums over ranks not counted",
    "narrow_error": "With `--narrow-wire`: root mean square error of what was sent, relative to it; the worst rank",
    "nodes": "Nodes that are in the cluster now",
    "epoch": "How many times the cluster has formed with another set of nodes or another plan",
    "losses": "Ranks of the plan that were lost so far",
    "weights_liars": "Nodes that gave bytes of weights with another hash than they should have",
    "weights_bytes": "Bytes of weights that a node took from `source`",
    "memory_bytes": "Bytes of memory that a node gives to the cluster (its `--memory`, or all that it has)",
    "rss_bytes": "Bytes of memory that a node's process holds now (resident set size)",
    "peak_bytes": "Most bytes of memory that a node's process has held since its present part began",
}
"""Of those that are exported as gauges under their own names, `tllm_KEY`."""

LABELS = {
    "weights_bytes": ("node", "source"),
    "memory_bytes": ("node",),
    "rss_bytes": ("node",),
    "peak_bytes": ("node",),
}
"""Statistics of several things, told apart by labels: the key is the name and each label's value, as in `a/x/y`."""
