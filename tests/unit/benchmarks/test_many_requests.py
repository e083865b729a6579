"""What a client counts of replies, the file that both servers read, and what the page of many requests says."""

from __future__ import annotations

import asyncio
import importlib
import json
from pathlib import Path

import httpx
import pytest

from benchmarks.models.gguf_copy import gguf_copy
from benchmarks.models.random_llama import model_folder
from benchmarks.serving.many_requests import REPLY, figures_of, page, percentile
from benchmarks.serving.openai_client import Reply, ask


def streamed(*chunks: dict[str, object]) -> httpx.AsyncClient:
    """A client whose every request is answered by these chunks."""
    content = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    return httpx.AsyncClient(transport=httpx.MockTransport(lambda _: httpx.Response(200, text=content)))


def test_a_reply_has_the_moment_of_each_chunk_and_the_tokens_that_the_server_counts() -> None:
    word = {"choices": [{"text": " w"}]}
    client = streamed(word, word, word, {"choices": [], "usage": {"completion_tokens": 7}})
    reply = asyncio.run(ask(client, "http://server", "m", [1], 7))
    assert reply.tokens == 7 and len(reply.arrivals) == 3
    assert 0 < reply.first <= reply.last and len(reply.gaps) == 2
    with pytest.raises(RuntimeError, match="no room"):
        asyncio.run(ask(streamed({"error": "no room"}), "http://server", "m", [1], 7))


def test_figures_are_of_all_replies_and_a_short_one_is_refused() -> None:
    replies = [Reply((1.0, 1.5, 3.0), REPLY), Reply((2.0, 2.25), REPLY)]
    assert figures_of(replies, 4.0) == {"tok_s": 2 * REPLY / 4, "first_s": [1.0, 2.0], "gaps_s": [0.5, 1.5, 0.25]}
    with pytest.raises(RuntimeError, match=f"{REPLY - 1} tokens where {REPLY}"):
        figures_of([*replies, Reply((1.0,), REPLY - 1)], 4.0)


def test_a_percentile_is_one_of_the_values() -> None:
    hundred = [float(value) for value in range(100, 0, -1)]
    assert [percentile(hundred, share) for share in (50, 95, 99)] == [50.0, 95.0, 99.0]
    assert percentile([1.0], 95) == 1.0 and percentile([1.0, 2.0], 95) == 2.0


def test_the_page_compares_rounds_and_says_which_aims_are_missed() -> None:
    def figures(rate: float) -> dict[str, object]:
        return {"tok_s": rate, "first_s": [1.0, 2.0, 3.0], "gaps_s": [0.1, 0.3]}

    runs = {
        "int4": {"tllm": {"8": [figures(60), figures(40)]}, "llama.cpp": {"8": [figures(20), figures(20)]}},
        "bfloat16": {"tllm": {"8": [figures(8)]}, "vLLM": {"8": [figures(10)]}},
    }
    made = page({"size": "1.1b", "kernels": "avx2", "runs": runs})
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in made.table.splitlines()]
    cells = {(line[0], line[2]): line[3:] for line in lines}
    assert cells["int4", "tllm"] == ["50.0", "", "2.00", "3.00", "200", "300"]
    assert cells["int4", "llama.cpp"][:2] == ["20.0", "2.50"]
    assert cells["bfloat16", "vLLM"][1] == "0.80"
    assert "bfloat16 with 8 at 89 % of the aim" in made.limits and "int4 with" not in made.limits
    assert "Not run: int8." in made.limits


def test_the_file_that_servers_read_names_every_token(tmp_path: Path) -> None:
    gguf = importlib.import_module("gguf")
    reader = gguf.GGUFReader(gguf_copy(model_folder("tiny", tmp_path), "int8"))
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    assert len(tokens) == 256 == len(set(tokens)) and tokens[:3] == ["<unk>", "<s>", "</s>"]
    assert reader.fields["tokenizer.ggml.eos_token_id"].contents() == 2
