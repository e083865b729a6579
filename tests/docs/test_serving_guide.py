"""What the guide to serving shows, but not as a command, works as it is written there."""

from __future__ import annotations

import re
from pathlib import Path

from tests.house.tree import ROOT
from tests.multi.serving.test_openai_client import Running
from tests.unit.server.kit import TOKENIZER, say
from tllm.server.admission.key_file import read_keys
from tllm.server.admission.token_bucket import UNLIMITED

GUIDE = (ROOT / "docs" / "guides" / "serve.md").read_text("utf-8")


def block(kind: str, begins: str) -> str:
    """The code of the guide that is of this kind and begins so."""
    (found,) = re.findall(rf"^```{kind}\n({re.escape(begins)}.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
    return str(found)


def test_its_file_of_keys_is_taken_by_its_command(tmp_path: Path) -> None:
    """It had a priority, and the command above it refuses priorities."""
    (command,) = re.findall(r"`(tllm serve MODEL --api-keys-file keys\.toml[^`]*)`", GUIDE)
    path = tmp_path / "keys.toml"
    path.write_text(block("toml", "[[keys]]"), "utf-8")
    alice, nightly = read_keys(path, UNLIMITED, "--scheduling-policy priority" in command)
    assert (alice.name, nightly.name, nightly.priority) == ("alice", "nightly", 10)


def test_its_call_of_a_tool_is_answered_by_a_model_that_knows_no_calls() -> None:
    """It is written for the tiny model, of which `auto` is refused."""
    call = '[{"name": "get_weather", "parameters": {"city": "Rome"}}]'
    running = Running(say(call)).start()
    try:
        names = {"client": running.client()}
        exec(compile(block("python", "tools = ["), "docs/guides/serve.md", "exec"), names)
        assert names["call"].function.arguments == '{"city": "Rome"}'
        assert names["answer"].choices[0].message.content == call, "text, as it is no call then"
        assert "sunny, 24 °C" in TOKENIZER.decode(running.engine.submitted[-1].prompt_ids, False)
    finally:
        running.ask_to_stop()
        assert running.join()
