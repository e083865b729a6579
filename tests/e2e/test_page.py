"""The page in a real browser, over a cluster of three processes that loses one while the page looks."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import re
import signal
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, Request, Route, expect

from tests.house.tree import ROOT
from tests.support.cluster.commands import running
from tests.support.models.adapters import save_adapter
from tests.support.serving.browser import CHROMIUM, Watched, tab

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(CHROMIUM is None, reason="this machine has no Chromium: `apt-get install chromium`"),
]
KEY = "a-key-for-the-page"
expect.set_options(timeout=60_000)  # milliseconds, in place of five seconds: what is expected comes
UNANSWERED = "Failed to load resource: the server responded with a status of 401"
"""What the browser itself says of a request that the server refuses for want of a key."""


def cluster(address: str) -> Any:
    asked = urllib.request.Request(f"{address}v1/cluster", headers={"authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(asked) as reply:
        return json.load(reply)


def test_the_page(tmp_path: Path) -> None:
    adapter = save_adapter(ROOT / "models" / "tiny", tmp_path)
    words = ["--local", "3", "--plan", "pp=3", "--port", "0", "--api-key", KEY]
    words += ["--enable-lora", "--lora-modules", f"poems={adapter}"]
    with running("serve", "models/tiny", *words) as server:
        address = server.until(r"serving .* at (http://[^/]+)/v1")[1] + "/"
        with tab(address) as watched:
            gives_the_key(watched)
            sees_the_machines(watched.page)
            sees_what_was_predicted(watched.page)
            fits_its_window(watched)
            sees_a_node_lost_while_a_chat_is_written(watched.page, address)
            begins_a_new_chat_while_one_is_written(watched.page)
            chats_with_an_adapter_by_keyboard(watched.page)
            assert watched.faults == []
            is_told_that_nobody_answers(watched.page)
        assert server.interrupt()[0] == 0


def gives_the_key(watched: Watched) -> None:
    """First a wrong one."""
    watched.page.get_by_label("asks for its API key").fill("not-the-key")
    watched.page.keyboard.press("Enter")
    expect(watched.page.locator("#key-fault")).to_contain_text("a valid API key is needed")
    assert all(UNANSWERED in fault for fault in watched.faults)
    watched.faults.clear()
    watched.page.get_by_label("asks for its API key").fill(KEY)
    watched.page.keyboard.press("Enter")
    expect(watched.page.locator("#state")).to_have_text("tiny ready")


def sees_the_machines(page: Page) -> None:
    expect(page.locator(".card")).to_have_count(3)
    expect(page.locator(".card").nth(1)).to_contain_text("layers 2 to 3")
    expect(page.locator(".hop").nth(2)).to_contain_text("back to the first")
    expect(page.locator(".chart")).to_have_count(4)
    expect(page.locator(".chart").nth(2)).to_contain_text("– nothing yet")
    expect(page.locator("#predicted")).to_contain_text("Nobody predicted this plan")


def sees_what_was_predicted(page: Page) -> None:
    """As if the cluster had been surveyed, which takes longer than this test may."""
    path = {"source": 0, "target": 1, "latency": 0.0005, "bandwidth": 1.25e8}
    survey = {"nodes": [{"node": f"local-{rank}"} for rank in range(3)], "ways": [path]}
    numbers = {"first_token": 0.5, "per_token": 0.02, "tokens_per_second": 80.0}
    load = {"prompt": 60, "reply": 100, "concurrency": 2}
    beside = {**load, "requests": 7, "predicted": numbers, "measured": {**numbers, "per_token": 0.025}}

    def surveyed(route: Route) -> None:
        reply = route.fetch().json()
        nodes = [{**node, "node": f"local-{node['rank']}", "cores": node["rank"] + 1} for node in reply["nodes"]]
        predicted = {**numbers, **load, "stages": [0.004, 0.005, 0.006], "beside": beside}
        route.fulfill(json={**reply, "nodes": nodes, "survey": survey, "predicted": predicted})

    page.route("**/v1/cluster", surveyed)
    expect(page.locator(".hop").first).to_contain_text("500 µs, 1,000 Mbit/s")
    expect(page.locator("#predicted")).to_contain_text("time between tokens20.0 ms25.0 ms+25 %")
    expect(page.locator("#predicted")).to_contain_text("the mean of the 7 that have ended: 2 at once")
    expect(page.locator(".card").nth(0)).to_contain_text("· 1 core")
    expect(page.locator(".card").nth(0)).not_to_contain_text("1 cores")
    expect(page.locator(".card").nth(1)).to_contain_text("· 2 cores")
    beside.update(requests=1, prompt=1)
    expect(page.locator("#predicted")).to_contain_text("like the one that has ended: 2 at once, each of 1 token and")
    expect(page.locator(".chart").first).to_contain_text("predicted 80")
    numbers["per_token"] = None
    beside["measured"] = {**numbers, "first_token": 0.75}
    expect(page.locator("#predicted")).to_contain_text("time to an answer500 ms750 ms+50 %answers per second80")
    expect(page.locator("#predicted")).to_contain_text("each of 1 token.")
    expect(page.locator("#predicted")).not_to_contain_text("tokens")
    expect(page.locator(".chart").nth(0)).to_contain_text("Answers per second")
    expect(page.locator(".chart").nth(0)).to_contain_text("predicted 80")
    expect(page.locator(".chart").nth(1)).to_contain_text("Time to an answer")
    expect(page.locator(".chart").nth(1)).to_contain_text("predicted 500 ms")
    page.unroute_all()


def fits_its_window(watched: Watched) -> None:
    """At the width of a desk and of two phones, in both views; arrow keys go from one view to the other."""
    page = watched.page
    for width, height in ((1280, 900), (390, 800), (320, 568)):
        page.set_viewport_size({"width": width, "height": height})
        assert watched.overflow <= 0
        page.get_by_role("tab", name="Cluster").press("ArrowRight")
        expect(page.locator("#composer")).to_be_visible()
        assert watched.overflow <= 0
        page.get_by_role("tab", name="Chat").press("ArrowLeft")
        expect(page.locator("#machines")).to_be_visible()


def sees_a_node_lost_while_a_chat_is_written(page: Page, address: str) -> None:
    page.get_by_role("tab", name="Chat").click()
    page.get_by_label("Message", exact=True).fill("def main")
    page.get_by_text("Settings").click()
    page.get_by_label("Most tokens").fill("400")
    page.get_by_label("Temperature").fill("0")
    page.get_by_role("button", name="Send").click()
    reply = page.locator("#messages li.assistant")
    expect(reply).to_have_text(re.compile(r"\w{3}"))
    os.kill(next(node["pid"] for node in cluster(address)["nodes"] if node["rank"] == 1), signal.SIGKILL)
    expect(reply).to_contain_text(re.compile(r"tokens/s · \d+ tokens"))
    expect(reply.locator(".fault")).to_have_count(0)

    page.get_by_role("tab", name="Cluster").click()
    expect(page.locator("#events")).to_contain_text(re.compile(r"node local-\d \(rank 1, layers \[2, 4\)\) went away"))
    expect(page.locator("#plan")).to_contain_text("1 node lost so far")
    expect(page.locator("#state")).to_have_text("tiny ready")


def begins_a_new_chat_while_one_is_written(page: Page) -> None:
    """It knows nothing of the one before."""
    asked = list[Any]()

    def note(request: Request) -> None:
        if request.method == "POST":
            asked.append(json.loads(request.post_data or ""))

    page.on("request", note)
    page.get_by_role("tab", name="Chat").click()
    page.get_by_role("button", name="New chat").click()
    for words in ("first", "second"):
        page.get_by_label("Message", exact=True).fill(words)
        page.get_by_role("button", name="Send").click()
        expect(page.locator("#messages li.assistant div").first).to_be_attached(timeout=30_000)
        page.get_by_role("button", name="New chat").click()
        expect(page.get_by_role("button", name="Send")).to_be_visible()
    page.remove_listener("request", note)
    assert [[one["content"] for one in body["messages"]] for body in asked] == [["first"], ["second"]]
    page.get_by_role("tab", name="Cluster").click()


def chats_with_an_adapter_by_keyboard(page: Page) -> None:
    """Who sends by the button can stop by the next key, and has the reply read aloud once it is whole."""
    page.get_by_role("tab", name="Chat").click()
    settings = page.locator("#settings > summary")
    settings.press("Enter")  # shut
    settings.press("Enter")
    page.get_by_role("combobox", name="Model").select_option("poems")
    page.get_by_label("Message", exact=True).fill("def main")
    with page.expect_request(lambda asked: asked.method == "POST") as asked:
        page.get_by_role("button", name="Send").press("Enter")
        expect(page.get_by_role("button", name="Stop")).to_be_focused()
        expect(page.locator("#messages")).to_have_attribute("aria-busy", "true")
    assert json.loads(asked.value.post_data or "")["model"] == "poems"
    expect(page.locator("#messages li.assistant div").first).to_be_attached()
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Send")).to_be_focused()
    expect(page.locator("#messages")).to_have_attribute("aria-busy", "false")
    page.get_by_role("tab", name="Cluster").click()


def is_told_that_nobody_answers(page: Page) -> None:
    page.route("**/v1/**", lambda route: route.abort())
    expect(page.locator("#state")).to_have_text("no answer")
    expect(page.locator("#trouble")).to_contain_text("The server does not answer")
    page.get_by_role("tab", name="Chat").click()
    page.get_by_label("Message", exact=True).fill("def main")
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#messages .fault").last).to_have_text(
        "The server does not answer. Send it again once it does."
    )
    page.get_by_label("Message", exact=True).fill("def main")
    with page.expect_request(lambda asked: asked.method == "POST") as asked:
        page.get_by_role("button", name="Send").click()
    roles = [one["role"] for one in json.loads(asked.value.post_data or "")["messages"]]
    assert roles == ["user", "assistant", "user"], "what nobody answered is sent no more"
    page.unroute_all()
    expect(page.locator("#state")).to_have_text("tiny ready")
    expect(page.locator("#trouble")).to_be_hidden()


class Site(http.server.BaseHTTPRequestHandler):
    """A site whose pages are empty."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


ASK = """async (url) => {
  const headers = {"content-type": "application/json", authorization: "Bearer KEY", "x-stainless-lang": "js"};
  const body = JSON.stringify({messages: [{role: "user", content: "a"}], max_tokens: 2});
  const reply = await fetch(url + "/v1/chat/completions", {method: "POST", headers, body}).catch((error) => null);
  return reply && [(await reply.json()).object, Boolean(reply.headers.get("x-request-id"))];
}"""


def test_a_page_of_another_site_may_call_if_its_origin_is_allowed() -> None:
    with contextlib.ExitStack() as entered:
        sites = [entered.enter_context(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Site)) for _ in range(2)]
        for site in sites:
            threading.Thread(target=site.serve_forever, daemon=True).start()
            entered.callback(site.shutdown)
        allowed, other = (f"http://127.0.0.1:{site.server_address[1]}" for site in sites)
        words = ["--port", "0", "--api-key", KEY, "--allow-origin", allowed]
        server = entered.enter_context(running("serve", "models/tiny", *words))
        url = server.until(r"serving .* at (http://[^/]+)/v1")[1]
        for origin, said in ((allowed, ["chat.completion", True]), (other, None)):
            with tab(origin + "/") as watched:
                assert watched.page.evaluate(ASK.replace("KEY", KEY), url) == said
        assert server.interrupt()[0] == 0


@pytest.mark.slow
def test_the_page_of_a_training_run(tmp_path: Path) -> None:
    """Every save is told, and Ctrl-C ends the run as it does without a page."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": f"row {number} of a short text"}) + "\n" for number in range(64)))
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text('{"prompt": "<b>first</b>", "completion": "one"}\n{"prompt": "second", "completion": "two"}\n')
    keys = {"model_name_or_path": "models/tiny", "train_files": [str(rows)], "output_dir": str(tmp_path / "run")}
    more = {"max_steps": 100_000, "seq_len": 32, "global_batch_size": 2, "save_steps": 5, "save_total_limit": 2}
    more |= {"eval_files": [str(held_out)], "eval_steps": 5, "eval_num_prompts": 2, "eval_max_new_tokens": 8}
    job = tmp_path / "job.toml"
    job.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in (keys | more).items()))
    with running("train", str(job), "--plan", "pp=2", "--page", "0", "--quiet") as run:
        address = run.until(r"page is at (http://\S+)")[1] + "/"
        with tab(address) as watched:
            expect(watched.page.locator("#state")).to_have_text("run trains")
            expect(watched.page.locator(".card")).to_have_count(2)
            expect(watched.page.get_by_role("tab", name="Chat")).to_be_hidden()
            expect(watched.page.locator(".chart").first).to_contain_text(re.compile(r"Loss\d+\.\d{3} between"))
            expect(watched.page.locator("#requests")).to_contain_text("of 100,000")
            expect(watched.page.locator("#events")).to_contain_text("saved step 5")
            expect(watched.page.locator("#completions h2")).to_contain_text(re.compile(r"held out, after step \d+$"))
            expect(watched.page.locator("#completions tbody tr")).to_have_count(2)
            expect(watched.page.locator("#completions td").first).to_contain_text("<b>first</b>")
            expect(watched.page.locator("#completions tbody")).to_contain_text("two")
            expect(watched.page.locator(".chart").filter(has_text="Held-out loss")).to_have_count(1)
            expect(watched.page.locator(".chart").filter(has_text="Held-out reward")).to_have_count(0)
            assert watched.overflow <= 0 and watched.faults == []
        assert run.interrupt()[0] == 130
