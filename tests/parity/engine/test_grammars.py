"""Replies that a grammar holds: the same under every layout, the slow way's, and in fewer turns where text is forced.

The slow way is here: for each token the whole text is a new prompt, a new matcher reads the reply so far, and a bias
of 100 decides between the tokens that it allows and the others.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import llguidance
import msgspec
import pytest

from tllm.core.errors import RequestError
from tllm.engine.engine import Engine
from tllm.engine.schedule.grammar_state import GrammarState
from tllm.engine.schedule.limits import EngineConfig
from tllm.server.reply.call_grammars import call_grammar
from tllm.server.reply.lark_rules import SpecialTokens
from tllm.spec.request import Grammar, Output, Request, SamplingParams
from tllm.text.grammar import GrammarCompiler
from tllm.text.tokenizer import Tokenizer

TINY = Path(__file__).parents[3] / "models" / "tiny"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "city": {"enum": ["Paris", "Rome"]},
        "numbers": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "city", "numbers"],
    "additionalProperties": False,
}
JSON = Grammar(kind="json_schema", text=json.dumps(SCHEMA))
GRAMMARS = {
    "json": JSON,
    "regex": Grammar(kind="regex", text=r"[a-c]{3}-[0-9]+(\.[0-9])?"),
    "choice": Grammar(kind="choice", text='["yes", "no", "maybe so"]'),
    "lark": Grammar(kind="grammar", text='start: "def " NAME "(" ")" ":"\nNAME: /[a-z]{1,5}/'),
    "gbnf": Grammar(kind="grammar", text='root ::= ("a" | "b")+ "!"'),
    "free": msgspec.structs.replace(JSON, free_from="def", free_until=":"),
}
PROMPTS = ("def main():\n    x = ", "import os\n\nclass Cat:", "{", "for name in names:\n    print(")
ROOMY = EngineConfig(dtype="float32", cache_tokens=2048, max_num_seqs=8)
TIGHT = EngineConfig(dtype="float32", cache_tokens=112, page_size=4, max_num_seqs=6, max_num_batched_tokens=24)
GREEDY = SamplingParams(max_tokens=60, temperature=0.0)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = Tokenizer.from_folder(TINY)
    assert found is not None
    return found


def requests(tokenizer: Tokenizer) -> list[Request]:
    """Every prompt with a grammar and one without; greedy, sampled, penalised, biased and with log-probabilities."""
    kinds = [
        GREEDY,
        msgspec.structs.replace(GREEDY, temperature=0.9, seed=3, top_p=0.9, logprobs=2),
        msgspec.structs.replace(GREEDY, frequency_penalty=0.7, repetition_penalty=1.2),
        msgspec.structs.replace(GREEDY, temperature=1.3, seed=5, min_tokens=12, logit_bias={65: 3.0}, min_p=0.01),
    ]
    made = []
    for at, (name, grammar) in enumerate([*GRAMMARS.items(), ("none", None)]):
        params = msgspec.structs.replace(kinds[at % len(kinds)], grammar=grammar)
        ids = tuple(tokenizer.encode(PROMPTS[at % len(PROMPTS)]))
        made.append(Request(id=name, prompt_ids=ids, params=params))
    return made


def served(engine: Engine, asked: list[Request]) -> dict[str, list[Output]]:
    streams = [(request.id, engine.submit(request)) for request in asked]
    return {name: list(stream) for name, stream in streams}


def ids_of(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def slow_ids(engine: Engine, tokenizer: Tokenizer, request: Request) -> list[int]:
    """Greedy tokens, each from the whole text anew, by a matcher of the library's own that reads the text so far."""
    compiler = GrammarCompiler(engine.limits.vocab_size, engine.spec.eos_token_ids)
    compiler.load_tokenizer = lambda: tokenizer
    params = request.params
    assert params.grammar is not None
    ids: list[int] = []
    while len(ids) < params.max_tokens:
        matcher = compiler.matcher(params.grammar)
        assert all(matcher.consume(token) for token in ids)
        if matcher.is_ended:
            return ids
        mask = matcher.allowed()
        allowed = {token for token in range(engine.limits.vocab_size) if mask >> token & 1}
        others = set(range(engine.limits.vocab_size)) - allowed
        # A request takes 1,024 biases, so they are given to the smaller set.
        bias = dict.fromkeys(allowed, 100.0) if len(allowed) < len(others) else dict.fromkeys(others, -100.0)
        once = SamplingParams(max_tokens=1, temperature=0.0, logit_bias=bias)
        ids += ids_of(list(engine.submit(Request(id="slow", prompt_ids=(*request.prompt_ids, *ids), params=once))))
    return ids


@pytest.mark.timeout(240)
def test_every_layout_gives_the_same_tokens_and_they_follow_the_grammar(tokenizer: Tokenizer) -> None:
    asked = requests(tokenizer)
    with Engine.load(TINY, "pp=1", ROOMY) as engine:
        want = served(engine, asked)
        for name in ("json", "regex", "choice"):
            request = next(one for one in asked if one.id == name)
            plain = msgspec.structs.replace(request, params=msgspec.structs.replace(GREEDY, grammar=GRAMMARS[name]))
            again = msgspec.structs.replace(plain, id="again")
            assert ids_of(list(engine.submit(again))) == slow_ids(engine, tokenizer, plain)
    texts = {name: tokenizer.decode(ids_of(outputs), skip_special_tokens=True) for name, outputs in want.items()}
    assert set(json.loads(texts["json"])) == set(SCHEMA["properties"])
    assert texts["choice"] in ("yes", "no", "maybe so")
    assert want["json"][-1].finish_reason == "stop"
    preemptions = 0.0
    drafting = msgspec.structs.replace(ROOMY, num_speculative_tokens=4)
    for layout, config in (
        ("pp=2,tp=1+2", TIGHT),
        ("tp=3,shares=1:2:1", TIGHT),
        ("pp=1", drafting),
        ("pp=3,layers=1+3+2", msgspec.structs.replace(TIGHT, num_speculative_tokens=5)),
    ):
        with Engine.load(TINY, layout, config) as engine:
            got = served(engine, asked)
            preemptions += engine.stats()["preemptions"]
        for name, outputs in want.items():
            assert ids_of(got[name]) == ids_of(outputs), (layout, name)
            assert got[name][-1].finish_reason == outputs[-1].finish_reason
    assert preemptions, "nobody had to make room"


def test_a_reply_goes_on_from_any_of_its_tokens(tokenizer: Tokenizer) -> None:
    """As after the loss of a node, when the next epoch knows only what was given out."""
    asked = next(one for one in requests(tokenizer) if one.id == "json")
    with Engine.load(TINY, "pp=2", ROOMY) as engine:
        ids = ids_of(list(engine.submit(asked)))
        for given in range(1, len(ids)):
            rest = msgspec.structs.replace(asked, id=f"rest-{given}", output_ids=tuple(ids[:given]))
            assert ids_of(list(engine.submit(rest))) == ids[given:]
        other = msgspec.structs.replace(asked, id="other", output_ids=(5, 5))
        with pytest.raises(RequestError, match="cannot be followed"):
            list(engine.submit(other))


@pytest.mark.parametrize("layout", ["pp=1", "pp=2"])
def test_forced_text_takes_no_turn_of_the_ring(
    tokenizer: Tokenizer, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {f"a_rather_long_key_{n}": {"enum": [n]} for n in range(4)}
    schema = {"type": "object", "properties": keys, "required": list(keys), "additionalProperties": False}
    grammar = Grammar(kind="json_schema", text=json.dumps(schema))
    params = msgspec.structs.replace(GREEDY, max_tokens=200, grammar=grammar)
    request = Request(id="forced", prompt_ids=tuple(tokenizer.encode(PROMPTS[0])), params=params)

    def turns() -> tuple[list[int], int]:
        with Engine.load(TINY, layout, ROOMY) as engine:
            return ids_of(list(engine.submit(request))), engine.stages[0].batches

    ids, with_drafts = turns()
    assert json.loads(tokenizer.decode(ids)) == {key: n for n, key in enumerate(keys)}
    monkeypatch.setattr("tllm.engine.schedule.scheduler.with_grammars", lambda sequences, proposed, limits: proposed)
    plain_ids, without = turns()
    assert plain_ids == ids
    assert without == len(ids)
    assert with_drafts <= len(ids) / 3


def calling(tokenizer: Tokenizer) -> SamplingParams:
    """Greedy, and held where a call is begun."""
    held = {"get_weather": SCHEMA, "get_time": {"type": "object", "properties": {}, "additionalProperties": False}}
    text = call_grammar("hermes", SpecialTokens(tokenizer), held, True, ("<think>", "</think>"))
    return msgspec.structs.replace(GREEDY, max_tokens=100, grammar=Grammar(kind="grammar", text=text))


def test_a_call_is_held_once_it_is_begun_and_its_forced_text_takes_few_turns(tokenizer: Tokenizer) -> None:
    """The model would write none by itself, so its beginning is given, as after the loss of a node."""
    begun = tokenizer.encode("<think>a</think> so <tool_call>", add_special_tokens=False)
    request = Request(
        id="call",
        prompt_ids=tuple(tokenizer.encode(PROMPTS[0])),
        params=calling(tokenizer),
        output_ids=tuple(begun),
    )
    made: dict[str, list[int]] = {}
    for layout, config in (
        ("pp=1", ROOMY),
        ("pp=2", msgspec.structs.replace(ROOMY, num_speculative_tokens=4)),
        ("tp=2", TIGHT),
    ):
        with Engine.load(TINY, layout, config) as engine:
            made[layout] = ids_of(list(engine.submit(request)))
            turns = engine.stages[0].batches
        assert made[layout] == made["pp=1"]
        if config is ROOMY:
            assert turns < len(made[layout]) * 0.8
    said = tokenizer.decode(made["pp=1"]).partition("</tool_call>")[0]
    call = json.loads(said)
    assert call["name"] in ("get_weather", "get_time")
    if call["name"] == "get_weather":
        assert set(call["arguments"]) == set(SCHEMA["properties"])


@pytest.mark.parametrize("layout", ["pp=1", "pp=2"])
def test_where_no_call_is_begun_all_is_as_without_a_grammar(
    tokenizer: Tokenizer, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens, log-probabilities, and what travels: a mask is sent for none of them."""
    grammar = calling(tokenizer).grammar
    kinds = [request.params for request in requests(tokenizer)[:4]]
    sent: list[bytes] = []
    with Engine.load(TINY, layout, ROOMY) as engine:
        masks = GrammarState.masks

        def seen(state: GrammarState, drafts: list[int], unwanted: list[int], ignore_eos: bool) -> tuple[bytes, ...]:
            found = masks(state, drafts, unwanted, ignore_eos)
            sent.extend(found)
            return found

        monkeypatch.setattr(GrammarState, "masks", seen)
        for place, kind in enumerate(kinds):
            params = msgspec.structs.replace(kind, grammar=None, max_tokens=40, min_tokens=0)
            plain = Request(id=f"plain-{place}", prompt_ids=tuple(tokenizer.encode(PROMPTS[place])), params=params)
            held = msgspec.structs.replace(
                plain, id=f"held-{place}", params=msgspec.structs.replace(params, grammar=grammar)
            )
            got = served(engine, [plain, held])
            assert ids_of(got[plain.id]) == ids_of(got[held.id])
            assert [one.logprobs for one in got[plain.id]] == [one.logprobs for one in got[held.id]]
            assert got[plain.id][-1].finish_reason == got[held.id][-1].finish_reason
    assert sent and not any(sent)


def test_an_end_comes_only_where_the_grammar_may_end(tokenizer: Tokenizer) -> None:
    eos = tokenizer.eos_ids[0]
    run = msgspec.structs.replace(GREEDY, max_tokens=12, logit_bias={eos: 100.0})
    with Engine.load(TINY, "pp=1", ROOMY) as engine:

        def reply(text: str, **more: object) -> tuple[list[int], str | None]:
            params = msgspec.structs.replace(run, grammar=Grammar(kind="regex", text=text), **more)
            outputs = list(engine.submit(Request(id="r", prompt_ids=(5, 6), params=params)))
            return ids_of(outputs), outputs[-1].finish_reason

        ids, reason = reply("a{2,}b*")
        assert (tokenizer.decode(ids[:-1]), ids[-1], reason) == ("aa", eos, "stop")
        ids, reason = reply("a{2,}b*", min_tokens=6)
        assert ids[-1] == eos and len(ids) == 7 and eos not in ids[:-1]
        ids, reason = reply("a{2,}b*", ignore_eos=True)
        assert eos not in ids and (len(ids), reason) == (12, "length")
        for more in ({}, {"ignore_eos": True}, {"min_tokens": 10}, {"stop_token_ids": (5,)}):
            ids, reason = reply("xyz", **more)
            assert (tokenizer.decode(ids), reason) == ("xyz", "stop"), "it ends with its last token, and no other"


def test_grammars_that_cannot_be_followed_end_only_their_request(tokenizer: Tokenizer) -> None:
    bad = partial(msgspec.structs.replace, GREEDY)
    with Engine.load(TINY, "pp=1", ROOMY) as engine:
        for text in ('{"type": "objekt"}', "{", '{"enum": ["' + "x" * 70_000 + '"]}'):
            with pytest.raises(RequestError):
                engine.generate([[5, 6]], bad(grammar=Grammar(kind="json_schema", text=text)))
        assert len(engine.generate([[5, 6]], bad(max_tokens=3))[0]) == 3


def test_the_library_is_the_one_that_the_lock_names() -> None:
    lock = (Path(__file__).parents[3] / "requirements.lock").read_text()
    assert f"llguidance=={llguidance.__version__}\n" in lock
