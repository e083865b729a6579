"""What the page sends: only its own files, that name no other place, under a policy that allows no other."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest

from tests.unit.server.kit import get, refusal, say, serve
from tllm.server.live.run_log import KEPT_STEPS
from tllm.server.live.samples import KEPT_SAMPLES

FILES = {entry.name: entry.read_text() for entry in files("tllm.server.page").joinpath("files").iterdir()}


@pytest.mark.parametrize("path", ["/", *(f"/page/{name}" for name in FILES)])
def test_each_file_needs_no_key_and_comes_with_the_policy(path: str) -> None:
    reply = get(serve(say(), api_keys=("a-long-key",)), path)
    assert reply.status_code == 200
    policy = dict(part.split(" ", 1) for part in reply.headers["content-security-policy"].split("; "))
    assert policy.pop("default-src") == "'none'"
    assert set(policy.values()) == {"'self'", "'none'"}, "nothing inline, nothing from elsewhere"
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert reply.text == FILES["index.html" if path == "/" else path.removeprefix("/page/")]


@pytest.mark.parametrize("name", ["page_files.py", "..%2fpage_files.py", "%2e%2e/page_files.py", "", "x.js", "a/b.js"])
def test_there_are_no_other_files(name: str) -> None:
    refusal(get(serve(say()), f"/page/{name}"), 404)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_other_methods_need_a_key(method: str) -> None:
    app = serve(say(), api_keys=("a-long-key",))
    assert get(app, "/", method).status_code == get(app, "/page/page.js", method).status_code == 401


def test_no_file_names_another_place() -> None:
    for name, text in FILES.items():
        addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"'`]*", text))
        assert addresses <= {"http://www.w3.org/2000/svg"}, name


def test_what_files_ask_for_is_there() -> None:
    asked = {name for text in FILES.values() for name in re.findall(r"\"(?:/page/|\./)([\w.-]+)\"", text)}
    assert asked <= FILES.keys()
    assert FILES.keys() - asked == {"index.html"}, "no file that nobody asks for"


def test_the_page_does_what_its_policy_allows() -> None:
    """No inline script or style, and text from elsewhere never becomes HTML."""
    assert not re.search(r"<style|style=|<script(?![^>]* src=)|\son\w+=", FILES["index.html"])
    for name, text in FILES.items():
        if name.endswith(".js"):
            assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|\.style\b", text), name


def test_the_page_keeps_as_many_samples_as_the_server() -> None:
    """A page that was open for an hour drew the hour, as "the last ten minutes"."""
    kept = dict(re.findall(r'"(/v1/\w+/live)": (\d+)', FILES["history.js"]))
    assert kept == {"/v1/cluster/live": str(KEPT_SAMPLES), "/v1/training/live": str(KEPT_STEPS)}
