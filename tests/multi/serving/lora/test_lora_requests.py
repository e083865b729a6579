"""`LLM` with LoRA adapters that its calls ask for: what PEFT merges, under a plan too, loaded and let go as asked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.tree import ROOT
from tests.support.models.adapters import peft_adapter, save_adapter
from tests.support.models.families import save_model
from tllm import LLM, Generation, LoRARequest, SamplingParams
from tllm.core.errors import CapacityError, ConfigError, RequestError, WeightsError
from tllm.server.pooling.vectors import cosine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # each starts processes that load torch

TARGETS = ("q_proj", "v_proj", "o_proj", "down_proj")
PROMPTS = [[*range(3, 20)], [*range(30, 60)]]
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, logprobs=0)
TINY = ROOT / "models" / "tiny"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, its adapters a and b of PEFT's, and what PEFT merges of each."""
    made = tmp_path_factory.mktemp("requests")
    for seed, name in enumerate("ab", 1):
        truth = save_model("llama", made / "model")
        peft = peft_adapter(truth, made / name, TARGETS, seed)
        peft.double().merge_and_unload().save_pretrained(made / f"merged_{name}")
    return made


@pytest.fixture(scope="module")
def merged(folder: Path) -> dict[str, list[Generation]]:
    """Replies of the model alone, "", and of each adapter merged into it, in float64."""
    models = {"": folder / "model", **{name: folder / f"merged_{name}" for name in "ab"}}
    replies = {}
    for name, model in models.items():
        with LLM(model, dtype="float64") as llm:
            replies[name] = llm.generate(PROMPTS, GREEDY)
    assert len({reply.token_ids for of_one in replies.values() for reply in of_one}) == 6
    return replies


def request(folder: Path, name: str) -> LoRARequest | None:
    return LoRARequest(name, 1, str(folder / name)) if name else None


def check(found: list[Generation], want: list[Generation]) -> None:
    for one, other in zip(found, want, strict=True):
        assert one.token_ids == other.token_ids
        ours, theirs = ([score.logprob for score in reply.logprobs] for reply in (one, other))
        assert ours == pytest.approx(theirs, abs=1e-9)


@pytest.mark.parametrize("plan", ["pp=1", "pp=2,tp=1+2"])
def test_replies_are_those_of_what_peft_merges(plan: str, folder: Path, merged: dict[str, list[Generation]]) -> None:
    """Of all prompts, of each in one batch with others, of the model alone, and in pieces."""
    with LLM(folder / "model", plan, dtype="float64", enable_lora=True, max_loras=2) as llm:
        for name in ("a", "", "b"):
            check(llm.generate(PROMPTS, GREEDY, lora_request=request(folder, name)), merged[name])
        for names in (("a", "b"), ("b", "")):
            found = llm.generate(PROMPTS, GREEDY, lora_request=[request(folder, name) for name in names])
            check(found, [merged[name][place] for place, name in enumerate(names)])


@pytest.mark.parametrize("plan", ["pp=1", "pp=2,tp=1+2"])
def test_embeddings_and_scores_are_those_of_what_peft_merges(plan: str, folder: Path) -> None:
    """Of all prompts, and of each in turn: of an adapter, of the model alone, of another."""
    want = {}
    for name, model in {"": "model", "a": "merged_a", "b": "merged_b"}.items():
        with LLM(folder / model, dtype="float64") as llm:
            want[name] = [one.embedding for one in llm.embed([*PROMPTS, PROMPTS[0][:9]])]
    assert len({vector for of_one in want.values() for vector in of_one}) == 9
    with LLM(folder / "model", plan, dtype="float64", enable_lora=True, max_loras=2) as llm:
        for name in ("a", "", "b"):
            found = llm.embed([*PROMPTS, PROMPTS[0][:9]], lora_request=request(folder, name))
            for one, other in zip(found, want[name], strict=True):
                assert one.embedding == pytest.approx(other, abs=1e-10)
        names = ("b", "", "b")
        mixed = llm.embed([*PROMPTS, PROMPTS[0][:9]], lora_request=[request(folder, name) for name in names])
        for place, name in enumerate(names):
            assert mixed[place].embedding == pytest.approx(want[name][place], abs=1e-10)
            assert mixed[place].prompt_token_ids == tuple([*PROMPTS, PROMPTS[0][:9]][place])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, Path]]:
    """The tiny model with room for one adapter, and a folder of its adapters a, b and large."""
    made = tmp_path_factory.mktemp("tiny")
    for seed, (name, rank) in enumerate((("a", 4), ("b", 4), ("large", 20)), 1):
        save_adapter(TINY, made / name, seed, rank)
    with LLM(TINY, enable_lora=True) as llm:
        yield llm, made


def test_an_adapter_makes_room_for_the_next(tiny: tuple[LLM, Path]) -> None:
    """Also in a stream and in a chat; the folder is read again where it is another."""
    llm, folder = tiny
    plain = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)

    def text(name: str, path: str = "") -> str:
        (reply,) = llm.generate("def main(", plain, lora_request=LoRARequest(name, 1, str(folder / (path or name))))
        return reply.text

    a, b = text("a"), text("b")
    assert len({a, b, llm.generate("def main(", plain)[0].text}) == 3
    for _ in range(2):
        assert (text("a"), text("b")) == (a, b)
    assert text("b", "a") == a, "the name has another folder now"
    assert "".join(llm.stream("def main(", plain, lora_request=request(folder, "a"))) == a
    said = [{"role": "user", "content": "Hello"}]
    assert llm.chat(said, plain).text != llm.chat(said, plain, lora_request=request(folder, "a")).text


def test_texts_are_scored_with_an_adapter(tiny: tuple[LLM, Path]) -> None:
    llm, folder = tiny
    texts = ["def main():", "class File:"]
    for name in ("a", "", "b"):
        vectors = [one.embedding for one in llm.embed(texts, lora_request=request(folder, name))]
        [same, other] = llm.score(texts[0], texts, lora_request=request(folder, name))
        assert same == pytest.approx(1.0) and other == pytest.approx(cosine(*vectors), abs=1e-6)
    assert len({llm.score(*texts, lora_request=request(folder, name))[0] for name in ("a", "", "b")}) == 3


def test_adapters_in_use_are_not_let_go(tiny: tuple[LLM, Path]) -> None:
    llm, folder = tiny
    long = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
    pieces = llm.stream("def main(", long, lora_request=request(folder, "a"))
    first = next(pieces)
    with pytest.raises(CapacityError, match=r"2 adapters are asked for at once, a, b, and max_loras is 1") as caught:
        llm.generate("x", GREEDY, lora_request=request(folder, "b"))
    assert caught.value.hint == "give LLM(max_loras=2)"
    with pytest.raises(RequestError, match=r"the adapter 'a' runs from .*/a"):
        llm.generate("x", GREEDY, lora_request=LoRARequest("a", 1, str(folder / "b")))
    whole = first + "".join(pieces)
    assert "".join(llm.stream("def main(", long, lora_request=request(folder, "a"))) == whole
    assert llm.generate("x", GREEDY, lora_request=request(folder, "b"))


def test_what_is_no_adapter_is_an_error_that_harms_no_other(tiny: tuple[LLM, Path], tmp_path: Path) -> None:
    llm, folder = tiny
    save_model("llama", tmp_path / "model")
    save_adapter(tmp_path / "model", tmp_path / "other")
    a = request(folder, "a")
    wrong = [
        (LoRARequest("c", 1, str(tmp_path)), ConfigError, "has no adapter_config.json"),
        (LoRARequest("c"), RequestError, "lacks a name or a folder"),
        (request(folder, "large"), ConfigError, "/large: the adapter has rank 20 and adapters up to rank 16"),
        (request(tmp_path, "other"), WeightsError, "/other: "),
        ([a, a], RequestError, "2 lora_requests for 1 prompt"),
        ("a", RequestError, "a LoRARequest, or one for each prompt, and a str was given"),
    ]
    for given, kind, words in wrong:
        with pytest.raises(kind, match=words):
            llm.generate("x", GREEDY, lora_request=given)  # type: ignore[arg-type]  # what mypy would refuse
        assert llm.generate("x", GREEDY, lora_request=a)
    twice = [a, LoRARequest("a", 1, str(folder / "b"))]
    with pytest.raises(RequestError, match="the adapter 'a' has two folders"):
        llm.generate(["x", "y"], GREEDY, lora_request=twice)


def test_adapters_are_switched_on(tiny: tuple[LLM, Path]) -> None:
    with LLM(TINY) as llm, pytest.raises(ConfigError, match="adapters are not loaded") as caught:
        llm.generate("x", GREEDY, lora_request=request(tiny[1], "a"))
    assert caught.value.hint == "give LLM(enable_lora=True) too"
    with pytest.raises(ConfigError, match="max_loras is 2 and adapters are not loaded"):
        LLM(TINY, max_loras=2)
    with pytest.raises(ConfigError, match="max_loras is 0"):
        LLM(TINY, enable_lora=True, max_loras=0)
