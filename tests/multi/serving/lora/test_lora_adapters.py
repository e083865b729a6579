"""LoRA adapters on a real cluster: over HTTP with the openai client, unloaded under requests, and after lost nodes."""

from __future__ import annotations

import asyncio
import contextlib
import io
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx
import openai
import pytest
from safetensors.torch import load_file, save_file

from tests.house.tree import ROOT
from tests.multi.faults.test_serving_recovery import SIZES, begun, kill, play
from tests.parity.engine.lora.test_lora import engine_with
from tests.support.models.adapters import save_adapter
from tests.support.models.families import save_model
from tllm.cli.main import main
from tllm.core.errors import CapacityError, ConfigError, RequestError, WeightsError
from tllm.node.coordinator.cluster_options import ClusterOptions
from tllm.node.serve import serving as serving_module
from tllm.node.serve.open_cluster import open_cluster
from tllm.node.serve.serving import Serving
from tllm.server.app import build_app
from tllm.server.http.settings import ServerSettings
from tllm.server.run import serving
from tllm.spec.request import Request, SamplingParams
from tllm.text.chat_template import ChatTemplate
from tllm.text.tokenizer import Tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # each starts several processes that load torch

PROMPT = (1, 2, 3, 4)
GREEDY = SamplingParams(max_tokens=120, temperature=0, ignore_eos=True)
PLAN = "pp=2,tp=1+2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and its adapters a and b."""
    made = tmp_path_factory.mktemp("lora")
    save_model("llama", made / "model")
    for seed, name in enumerate("ab", 1):
        save_adapter(made / "model", made / name, seed, rank=2 + seed)
    return made


@pytest.fixture(scope="module")
def truth(folder: Path) -> dict[str, list[int]]:
    """The reply without an adapter, "", and with each."""
    replies = {}
    with engine_with(folder / "model", [folder / "a", folder / "b"], cache_tokens=2048, max_model_len=256) as (
        engine,
        ids,
    ):
        for name, lora in zip(("", "a", "b"), ("", *ids), strict=True):
            stream = engine.submit(Request(id=f"truth-{name}", prompt_ids=PROMPT, params=GREEDY, lora=lora))
            replies[name] = [token for output in stream for token in output.token_ids]
    assert len({tuple(reply) for reply in replies.values()}) == 3
    return replies


class Replies:
    """A stream for each name, read as they come."""

    def __init__(self, cluster: Serving, names: Sequence[str]) -> None:
        self.ids: dict[str, list[int]] = {name: [] for name in names}
        self.tasks = [asyncio.create_task(self._read(cluster, name)) for name in names]

    async def _read(self, cluster: Serving, name: str) -> None:
        lora = cluster.adapters.id_of(name)
        assert bool(lora) == bool(name)
        request = Request(id=f"{name}-{id(self)}", prompt_ids=PROMPT, params=GREEDY, lora=lora)
        async for output in cluster.submit(request):
            self.ids[name] += output.token_ids

    async def reach(self, tokens: int) -> None:
        while min(map(len, self.ids.values())) < tokens:
            await asyncio.sleep(0.005)

    async def end(self) -> Mapping[str, list[int]]:
        await asyncio.gather(*self.tasks)
        return self.ids


def test_adapters_are_loaded_again_after_a_node_is_lost(
    folder: Path, truth: dict[str, list[int]], tmp_path: Path
) -> None:
    """Also though their folders are gone by then: nodes have their bytes from the coordinator."""

    async def scene() -> None:
        async with open_cluster(folder / "model", PLAN, SIZES, ClusterOptions(threads=1)) as cluster:
            cluster.adapters.max_loras = 2
            for name in "ab":
                copy = shutil.copytree(folder / name, tmp_path / name)
                await cluster.adapters.load(name, str(copy))
                shutil.rmtree(copy)
            replies, epoch = Replies(cluster, ["", "a", "b"]), cluster.state.epoch
            await replies.reach(10)
            kill(cluster, 1)
            assert await replies.end() == truth
            await begun(cluster, epoch + 1)
            kill(cluster, 0)
            assert await Replies(cluster, ["", "a", "b"]).end() == truth
            await cluster.adapters.unload("a")
            assert list(cluster.adapters.paths) == ["b"]
            assert await Replies(cluster, ["", "b"]).end() == {"": truth[""], "b": truth["b"]}

    play(scene)


def test_what_cannot_be_loaded_is_refused_and_leaves_nothing(
    folder: Path,
    truth: dict[str, list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    other = save_model("llama", tmp_path / "other", intermediate_size=60)
    del other
    save_adapter(tmp_path / "other", tmp_path / "wrong")
    needs: list[int] = []
    check = serving_module.check_machines

    def recorded(wanted: Sequence[int], machines: Sequence[tuple[str, int]]) -> None:
        needs[:] = wanted
        check(wanted, machines)

    async def scene() -> None:
        async with open_cluster(folder / "model", "pp=2", SIZES, ClusterOptions(threads=1)) as cluster:
            adapters = cluster.adapters
            with pytest.raises(WeightsError, match="has shape"):
                await adapters.load("wrong", str(tmp_path / "wrong"))
            with pytest.raises(WeightsError, match="cannot read"):
                await adapters.load("none", str(tmp_path / "none"))
            adapters.max_lora_rank = 2
            with pytest.raises(ConfigError, match="has rank 3 and adapters up to rank 2"):
                await adapters.load("a", str(folder / "a"))
            adapters.max_lora_rank = 16
            monkeypatch.setattr(serving_module, "check_machines", recorded)
            cluster._check_present()
            before = list(needs)
            with monkeypatch.context() as patch:
                patch.setattr(serving_module, "RUNTIME_BYTES", 1 << 50)
                with pytest.raises(CapacityError, match=r"need .* GiB and it has .* GiB, .* GiB too little"):
                    await adapters.load("a", str(folder / "a"))
            assert not adapters.paths and not cluster.coordinator.weights.adapters.files()
            of_other = shutil.copytree(folder / "a", tmp_path / "of-other")
            tensors = load_file(folder / "a" / "adapter_model.safetensors")
            save_file(tensors, of_other / "adapter_model.safetensors", {"format": "pt", "base_sha256": "0" * 64})
            await adapters.load("a", str(of_other))
            assert "adapter a was trained beside other weights than these" in caplog.text
            whole = sum(x.numel() for x in load_file(folder / "a" / "adapter_model.safetensors").values())
            assert sum(needs) - sum(before) == 4 * whole, "of float32, each tensor on one of the two stages"
            with pytest.raises(CapacityError, match="1 adapter is loaded and max_loras is 1"):
                await adapters.load("b", str(folder / "b"))
            for name, why in {"a": "has already been loaded, from", "model": "own name", "": "has no name"}.items():
                with pytest.raises(RequestError, match=why):
                    await adapters.load(name, str(folder / "b"))
            assert await Replies(cluster, ["", "a"]).end() == {"": truth[""], "a": truth["a"]}

    play(scene)


def test_the_openai_client_loads_uses_and_unloads_adapters(folder: Path, truth: dict[str, list[int]]) -> None:
    """Of an adapter that is unloaded under a reply the name is gone at once, and the reply goes on to its end."""

    async def scene() -> None:
        async with contextlib.AsyncExitStack() as stack:
            options = ClusterOptions(threads=1, lost_after=60.0)  # one that stands still for a moment is not lost
            cluster = await stack.enter_async_context(open_cluster(folder / "model", "pp=2", SIZES, options))
            cluster.adapters.max_loras = 2
            settings = ServerSettings(port=0)
            url = await stack.enter_async_context(
                serving(build_app(cluster, settings=settings, adapters=cluster.adapters), settings)
            )
            http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=60))
            client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
            stack.push_async_callback(client.close)

            async def post(what: str, **body: str) -> tuple[int, str]:
                reply = await http.post(f"/v1/{what}_lora_adapter", json=body)
                return reply.status_code, reply.text

            async def ids_of(model: str) -> list[int]:
                more = dict(ignore_eos=True, return_token_ids=True)
                reply = await client.completions.create(
                    model=model, prompt=list(PROMPT), max_tokens=120, temperature=0, extra_body=more
                )
                assert reply.model == model
                return list(reply.choices[0].model_extra["token_ids"])  # type: ignore[index]

            for name in "ab":
                status, text = await post("load", lora_name=name, lora_path=str(folder / name))
                assert (status, text) == (200, f"Success: LoRA adapter '{name}' added successfully.")
            cards = {card.id: card.model_extra for card in (await client.models.list()).data}
            assert list(cards) == ["model", "a", "b"]
            assert (cards["a"] or {})["parent"] == "model" and (cards["a"] or {})["root"] == str(folder / "a")
            found = await asyncio.gather(*(ids_of(name) for name in ("model", "a", "b")))
            assert found == [truth[""], truth["a"], truth["b"]]
            assert (await post("load", lora_name="a", lora_path=str(folder / "b")))[0] == 400
            running = Replies(cluster, ["a"])
            await running.reach(5)
            kill(cluster, 1, signal.SIGSTOP)
            assert (await post("unload", lora_name="a"))[0] == 200
            with pytest.raises(openai.NotFoundError, match="'a' is not served here"):
                await ids_of("a")
            assert len(running.ids["a"]) < 120
            kill(cluster, 1, signal.SIGCONT)
            assert await running.end() == {"a": truth["a"]}
            (left,) = cluster.coordinator.weights.adapters.files()
            assert left.lora == cluster.adapters.id_of("b"), "with its last request the other is let go"
            assert (await post("unload", lora_name="a"))[0] == 404
            # The same name with another adapter: nothing of the first is found in the cache.
            assert (await post("load", lora_name="a", lora_path=str(folder / "b")))[0] == 200
            assert await ids_of("a") == truth["b"]
            # A reply is broken off, and its adapter loaded anew, while batches that name it are under way.
            for _ in range(4):
                broken = Replies(cluster, ["b", "a", ""])
                await broken.reach(3)
                broken.tasks[0].cancel()
                await asyncio.wait(broken.tasks[:1])
                assert (await post("unload", lora_name="b"))[0] == 200
                assert (await post("load", lora_name="b", lora_path=str(folder / "b")))[0] == 200
                broken.tasks = broken.tasks[1:]
                assert {**await broken.end(), "b": truth["b"]} == {"a": truth["b"], "b": truth["b"], "": truth[""]}
            assert await ids_of("b") == truth["b"]
            assert (cluster.state.epoch, cluster.recovery.lost_ranks) == (1, 0)

    play(scene)


@pytest.fixture
def as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a command that runs in this process changes is as it was afterwards."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")


@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize("plan", ["pp=1", "tp=2"])
def test_generate_writes_with_an_adapter(
    folder: Path, truth: Mapping[str, list[int]], plan: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", str(folder / "model"), "--prompt-ids", "1,2,3,4", "--max-tokens", "120", "--ignore-eos"]
    asked = [*words, "--dtype", "float32", "--plan", plan, "--lora-modules", f"b={folder / 'b'}", "--quiet"]
    assert main(asked) == 0
    assert capsys.readouterr().out.strip() == ",".join(map(str, truth["b"]))


@pytest.mark.usefixtures("as_before")
def test_chat_replies_with_an_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `tllm generate` goes on with it after the text that the chat template makes."""
    tiny = ROOT / "models" / "tiny"
    given = ["--lora-modules", f"a={save_adapter(tiny, tmp_path / 'a')}", "--max-tokens", "8", "--quiet"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
    assert main(["chat", str(tiny), *given, "--temperature", "0"]) == 0
    chatted = capsys.readouterr().out
    tokenizer = Tokenizer.from_folder(tiny)
    template = ChatTemplate.from_folder(tiny, tokenizer)
    assert template is not None
    prompt = template.render([{"role": "user", "content": "Hello"}])
    for adapter, is_same in ((given, True), (given[2:], False)):
        assert main(["generate", str(tiny), *adapter, "--prompt", prompt]) == 0
        assert (capsys.readouterr().out == chatted) == is_same
