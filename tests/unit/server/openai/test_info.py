"""Health that tells the truth, metrics under known names, tokens and back."""

from __future__ import annotations

import time

from tests.unit.server.kit import SAID, TOKENIZER, get, post, refusal, say, serve
from tllm.server.openai.engine_client import Health
from tllm.text.chat_template import ChatTemplate


def test_three_kinds_of_health() -> None:
    engine = say()
    app = serve(engine, stall_seconds=5)
    for path in ("/health", "/health/ready", "/health/progress"):
        assert get(app, path).status_code == 200
    engine.well = Health(ready=False, reason="stage 1 is loading")
    assert get(app, "/health").status_code == 200
    assert "stage 1 is loading" in refusal(get(app, "/health/ready"), 503)["message"]
    engine.well = Health(running=2, seconds_since_step=6.0, node="lab-3")
    error = refusal(get(app, "/health/progress"), 503)
    assert error["code"] == "stalled"
    assert "lab-3" in error["message"]
    assert get(app, "/health").status_code == 200
    engine.well = Health(running=2, seconds_since_step=6.0, waits_for="lab-2")
    assert "no step for 6 s, waiting for node lab-2" in refusal(get(app, "/health/progress"), 503)["message"]
    engine.well = Health(running=2, seconds_since_step=1.0, waits_for="lab-2")
    assert get(app, "/health/progress").status_code == 200
    engine.well = Health(ready=False, running=2, node="lab-2", reason="lab-2 went away")
    for path, code in (("/health/ready", "not_ready"), ("/health/progress", "stalled")):
        error = refusal(get(app, path), 503)
        assert error["code"] == code and "lab-2 went away" in error["message"]
    assert get(app, "/health").status_code == 200
    silent = "node c (rank 2, layers [4, 6)) has been silent for 2.3 s"
    engine.well = Health(running=2, node="c", reason=silent)
    said = refusal(get(app, "/health/progress"), 503)["message"]
    assert said == f"2 sequences in hand do not move: {silent}", "the node is named once"
    engine.well = Health(running=0, seconds_since_step=600.0)
    assert get(app, "/health/progress").status_code == 200
    engine.well = Health(alive=False)
    for path in ("/health", "/health/ready", "/health/progress"):
        assert get(app, path).status_code == 503


def test_metrics_have_the_names_that_dashboards_ask_for() -> None:
    engine = say()
    app = serve(engine)
    post(app, "/v1/completions", {"prompt": "the dog", "max_tokens": 50})
    post(app, "/v1/completions", {"prompt": "the dog", "max_tokens": 50, "stop": "how"})
    text = get(app, "/metrics").text
    labels = '{engine="0",model_name="tiny"}'
    said = len(TOKENIZER.encode(SAID, add_special_tokens=False)) + 1
    stopped = len(TOKENIZER.encode(" hello world\n\nhow", add_special_tokens=False))
    assert f"vllm:prompt_tokens_total{labels} 6.0" in text
    assert f"vllm:generation_tokens_total{labels} {said + stopped}.0" in text
    assert 'vllm:request_success_total{engine="0",finished_reason="stop",model_name="tiny"} 2.0' in text
    assert f"vllm:num_preemptions_total{labels} 2.0" in text
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert f"vllm:{name}{labels}" in text
    for name in (
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
    ):
        assert f"vllm:{name}_bucket" in text
        assert f"vllm:{name}_count{labels} 0.0" not in text
    assert f"tllm_links{labels} 3.0" in text
    assert get(app, "/metrics").text.count(f"vllm:num_preemptions_total{labels} 2.0") == 1


def test_two_servers_in_one_process_count_apart() -> None:
    first, second = serve(say()), serve(say())
    post(first, "/v1/completions", {"prompt": "the dog"})
    assert "vllm:prompt_tokens_total" in get(second, "/metrics").text
    assert 'vllm:prompt_tokens_total{engine="0",model_name="tiny"} 0.0' in get(second, "/metrics").text


def test_tokens_and_back() -> None:
    app = serve(say())
    reply = post(
        app, "/tokenize", {"prompt": "hello 🙂", "add_special_tokens": False, "return_token_strs": True}
    ).json()
    assert reply["tokens"] == TOKENIZER.encode("hello 🙂", add_special_tokens=False)
    assert reply["count"] == len(reply["tokens"]) == len(reply["token_strs"])
    assert reply["max_model_len"] == 256
    assert post(app, "/detokenize", {"tokens": reply["tokens"]}).json() == {"prompt": "hello 🙂"}
    chat = post(app, "/tokenize", {"messages": [{"role": "user", "content": "hi"}]}).json()["tokens"]
    assert TOKENIZER.decode(chat) == "<s><|user|>user: hi</s><｜assistant｜>"
    long = post(app, "/tokenize", {"prompt": "word " * 9000}).json()
    assert long["count"] > 9000
    refusal(post(app, "/tokenize", {}), 400)
    asked = {"messages": [{"role": "user", "content": "hi"}]}
    wrong = post(app, "/tokenize", {**asked, "chat_template_kwargs": {"continue_final_message": True}})
    assert refusal(wrong, 400)["param"] == "chat_template_kwargs"
    tools = [{"type": "function", "function": {"name": "f"}}]
    template = ChatTemplate("{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}hi")
    shown = post(serve(say(), template=template), "/tokenize", {**asked, "tools": tools}).json()["tokens"]
    assert TOKENIZER.decode(shown) == "[f]hi", "a chat's tools are in its prompt"
    refusal(post(app, "/detokenize", {"tokens": [-1]}), 400)
    assert get(app, "/tokenizer_info").json()["eos_token"] == "</s>"


def test_the_cluster_the_version_and_the_model() -> None:
    app = serve(say(), version="1.2.3", fingerprint="fp")
    assert get(app, "/v1/cluster").json() == {"nodes": [{"node": "a", "rank": None, "layers": [0, 4]}]}
    assert get(app, "/version").json() == {"version": "1.2.3"}
    [card] = get(app, "/v1/models").json()["data"]
    assert (card["id"], card["max_model_len"]) == ("tiny", 256)
    assert post(app, "/v1/completions", {"prompt": "x"}).json()["system_fingerprint"] == "fp"


def test_a_request_keeps_its_id() -> None:
    app = serve(say())
    assert get(app, "/version", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    made = get(app, "/version", headers={"x-request-id": "a b\tc"}).headers["x-request-id"]
    assert made
    assert made != "a b\tc"


def test_models_are_as_old_as_the_server_in_every_clients_words() -> None:
    """Programs of ollama said "56 years ago"; Anthropic's client found neither names nor kinds."""
    started = 1_795_839_921
    app = serve(say(), started=started)
    assert get(app, "/v1/models").json()["data"][0]["created"] == started
    [listed] = get(app, "/api/tags").json()["models"]
    shown = post(app, "/api/show", {"model": "tiny"}).json()
    assert listed["modified_at"] == shown["modified_at"] == "2026-11-28T04:25:21Z"
    asked = {"anthropic-version": "2023-06-01"}
    page = get(app, "/v1/models", headers=asked).json()
    one = {"id": "tiny", "type": "model", "display_name": "tiny", "created_at": "2026-11-28T04:25:21Z"}
    one |= {"max_input_tokens": 256, "max_tokens": 256}
    assert page == {"data": [one], "has_more": False, "first_id": "tiny", "last_id": "tiny"}
    assert get(app, "/v1/models/tiny", headers=asked).json() == one
    now = get(serve(say()), "/v1/models").json()["data"][0]["created"]
    assert abs(now - time.time()) < 3600
