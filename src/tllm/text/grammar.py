"""Grammars that hold a reply to a form: checked when a request comes, and followed token by token while it is written.

The work is llguidance's, which is loaded when the first grammar comes. `check_grammar` says what is wrong with one
without a tokenizer. `GrammarCompiler` makes a `GrammarMatcher` of one for the tokens of a model.
"""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from tllm.core.errors import UNREADABLE, RequestError
from tllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_GRAMMAR_BYTES = 64 * 1024
MAX_CHOICES = 1024
KEPT_GRAMMARS = 16
"""Compiled grammars that are kept for the next request with the same one, as for the choices of `n`."""

WHITE_SPACE = tuple(character for character in map(chr, range(0x3001)) if character.isspace())
SPACES = 16

_NO_TEXT = 0xFF

JSON_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON on one line, as most models write it. Free white space would let a reply go on with blanks for ever, and would
leave nothing between two keys that is sure."""


class GrammarText(Protocol):
    """What is read of a grammar; `spec.request.Grammar` says what it means."""

    @property
    def kind(self) -> str: ...

    @property
    def text(self) -> str: ...

    @property
    def free_from(self) -> str: ...

    @property
    def free_until(self) -> str: ...

    def __hash__(self) -> int: ...


def check_grammar(grammar: GrammarText, param: str) -> None:
    """Raise RequestError, which names `param`, for a grammar that is too large or cannot be followed."""
    from llguidance import LLMatcher

    text = _library_form(grammar, param)
    fault = LLMatcher.validate_grammar(text, None, limits=_limits())
    if fault:
        raise RequestError(f"{param} cannot be followed: {_one_line(fault)}", "correct or simplify it", param)


def as_part(grammar: GrammarText, param: str) -> str:
    """A grammar that was checked, as a part of a larger one in Lark, without what may come before it."""
    if grammar.kind == "json_schema":
        return json_part(_schema(grammar.text, param))
    return f"%lark {{\n{_lark_of(grammar, param)}\n}}"


def json_part(schema: Mapping[str, Any]) -> str:
    """JSON of a schema on one line, as a part of a larger grammar in Lark."""
    return f"%json {json.dumps(_on_one_line(schema))}"


def can_start_with(grammar: GrammarText, texts: Sequence[str]) -> str:
    """One of these texts with which a reply of the form of a checked grammar can start, white space aside; "" for none.

    So much white space as readers of a reply leave out before them, up to `SPACES` characters. Runs of one length after
    which the same bytes can come count as one.
    """
    from llguidance import LLMatcher, LLTokenizer

    single_bytes = LLTokenizer("byte")
    matcher = LLMatcher(single_bytes, _library_form(grammar, "grammar"), log_level=0, limits=_limits())
    wanted = {text: single_bytes.tokenize_str(text) for text in texts}
    spaces = [single_bytes.tokenize_str(space) for space in WHITE_SPACE]
    matchers = [matcher]
    for _ in range(SPACES + 1):
        for text, tokens in wanted.items():
            if any(one.validate_tokens(tokens) == len(tokens) for one in matchers):
                return text
        after = dict[bytes, LLMatcher]()
        for one, space in itertools.product(matchers, spaces):
            if one.validate_tokens(space) == len(space):
                next_one = one.deep_copy()
                next_one.consume_tokens(space)
                after.setdefault(next_one.compute_bitmask(), next_one)
        matchers = list(after.values())
    return ""


class GrammarMatcher:
    """One reply's place in its grammar. Sets of tokens are ints whose bit number i stands for token i.

    `fault` says what went wrong inside, such as a grammar that grew too complex; it stays, and nothing is allowed.
    """

    def __init__(self, inner: LLMatcher) -> None:
        self._inner = inner
        self._allowed: int | None = None

    @property
    def fault(self) -> str:
        return _one_line(self._inner.get_error()) if self._inner.is_error() else ""

    @property
    def is_ended(self) -> bool:
        """Whether nothing but an end token can follow."""
        return self._inner.is_stopped()

    def allowed(self) -> int:
        """The tokens that may come next; end tokens are among them where the grammar may end."""
        if self._allowed is None:
            self._allowed = int.from_bytes(self._inner.compute_bitmask(), "little")
        return self._allowed

    def consume(self, token_id: int) -> bool:
        """Go on by one token; False where it is not allowed, after which the matcher is of no more use."""
        self._allowed = None
        return self._inner.consume_token(token_id)

    def roll_back(self, count: int) -> None:
        """Take the last `count` tokens back."""
        if count:
            self._allowed = None
            self._inner.rollback(count)

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens, from the first on, may follow one another here."""
        return self._inner.validate_tokens(list(token_ids)) if token_ids else 0

    def forced(self) -> list[int]:
        """Tokens of the only text that can follow, as the tokenizer cuts it; none where several texts can."""
        return self._inner.compute_ff_tokens()


class GrammarCompiler:
    """Makes matchers for a model with `vocab_size` tokens, of which `eos_ids` end a reply.

    `load_tokenizer` is called once, for the first grammar; it gives None where the model has no tokenizer. Any thread
    may compile, and holds up no other that knows its grammar; one thread uses the matchers.
    """

    def __init__(self, vocab_size: int, eos_ids: tuple[int, ...] = ()) -> None:
        self.vocab_size, self.eos_ids = vocab_size, eos_ids
        self.load_tokenizer: Callable[[], Tokenizer | None] = lambda: None
        self._vocabulary: LLTokenizer | None = None
        self.any_token = 0
        """The tokens that a grammar can allow, as a set; known once there is a matcher."""
        self._compiled: OrderedDict[GrammarText, LLMatcher] = OrderedDict()
        self._loading, self._keeping = threading.Lock(), threading.Lock()

    def knows(self, grammar: GrammarText) -> bool:
        """Whether a matcher, or why there is none, is at hand."""
        return grammar in self._compiled

    def compile(self, grammar: GrammarText) -> LLMatcher:
        """A matcher that stays at the beginning. RequestError for a grammar that is none, or without a tokenizer."""
        from llguidance import LLMatcher

        known = self._compiled.get(grammar)
        if known is None:
            known = LLMatcher(self._tokens(), _library_form(grammar, "grammar"), log_level=0, limits=_limits())
        self.keep(grammar, known)
        return known

    def keep(self, grammar: GrammarText, known: LLMatcher) -> None:
        """Know it as the last one that was asked for."""
        with self._keeping:
            self._compiled.pop(grammar, None)
            self._compiled[grammar] = known
            if len(self._compiled) > KEPT_GRAMMARS:
                self._compiled.popitem(last=False)

    def matcher(self, grammar: GrammarText) -> GrammarMatcher:
        """A matcher at the beginning. RequestError where the grammar cannot be followed."""
        known = self.compile(grammar)
        if known.is_error():
            raise RequestError(f"the grammar cannot be followed: {_one_line(known.get_error())}")
        return GrammarMatcher(known.deep_copy())

    def _tokens(self) -> LLTokenizer:
        with self._loading:
            if self._vocabulary is None:
                tokenizer = self.load_tokenizer()
                if tokenizer is None:
                    raise RequestError("a grammar needs a tokenizer and this model has none", "leave it out")
                self._vocabulary, texts = _library_tokens(tokenizer, self.vocab_size, self.eos_ids)
                self.any_token = texts.any_token()
            return self._vocabulary


class TokenTexts:
    """A tokenizer as the library wants one. Ids without a token have no bytes and are never allowed.

    The library finds a special token by its id, never by its text; other added tokens are texts like any other.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        self._tokenizer, self._lock = tokenizer, threading.Lock()
        self.eos_token_id, self.bos_token_id = eos_ids[0], tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        special = (token_id for token_id in range(vocab_size) if tokenizer.is_special(token_id))
        self.special_token_ids = sorted({*special, *eos_ids})

    def any_token(self) -> int:
        """The tokens that text can have, as a set. The library keeps a byte for itself that no UTF-8 has."""
        bits = bytearray(-(-len(self.tokens) // 8))
        for token_id, text in enumerate(self.tokens):
            if text and _NO_TEXT not in text:
                bits[token_id // 8] |= 1 << token_id % 8
        return int.from_bytes(bits, "little")

    def __call__(self, text: bytes | str) -> list[int]:
        """Ids of a text without special tokens around it."""
        return self._tokenizer.encode(text if isinstance(text, str) else text.decode(), add_special_tokens=False)


def _library_tokens(tokenizer: Tokenizer, vocab_size: int, eos_ids: tuple[int, ...]) -> tuple[LLTokenizer, TokenTexts]:
    from llguidance import LLTokenizer, TokenizerWrapper

    ends = tuple(dict.fromkeys(i for i in (*eos_ids, *tokenizer.eos_ids) if i < vocab_size))
    if not ends:
        raise RequestError("a grammar needs a token that ends a reply and this model names none", "leave it out")
    texts = TokenTexts(tokenizer, vocab_size, ends)
    return LLTokenizer(TokenizerWrapper(texts), eos_token=list(ends)), texts


def _library_form(grammar: GrammarText, param: str) -> str:
    """The grammar in the library's JSON, wrapped in the free text that may come before it."""
    size = len(grammar.text.encode(errors="replace"))
    if size > MAX_GRAMMAR_BYTES:
        raise RequestError(
            f"{param} has {size} bytes, at most {MAX_GRAMMAR_BYTES} are taken", "take what is not needed out", param
        )
    if grammar.kind == "json_schema":
        answer: dict[str, Any] = {"json_schema": _on_one_line(_schema(grammar.text, param))}
    else:
        answer = {"lark_grammar": _lark_of(grammar, param)}
    if not grammar.free_until:
        return json.dumps({"grammars": [answer]})
    opening = f"({json.dumps(grammar.free_from)} free)?" if grammar.free_from else "free"
    free = f"start: {opening} /\\s*/ @answer\nfree[suffix={json.dumps(grammar.free_until)}]: /(?s:.*)/\n"
    return json.dumps({"grammars": [{"lark_grammar": free}, {"name": "answer", **answer}]})


def _lark_of(grammar: GrammarText, param: str) -> str:
    """A grammar that is no schema, in Lark."""
    if grammar.kind == "regex":
        return _of_regex(grammar.text)
    if grammar.kind == "choice":
        return "start: " + " | ".join(map(json.dumps, _choices(grammar.text, param)))
    return _lark(grammar.text, param)


def _schema(text: str, param: str) -> dict[str, Any]:
    try:
        schema = msgspec.json.decode(text)
    except UNREADABLE as error:
        raise RequestError(f"{param} is not JSON: {str(error)[:200]}", param=param) from error
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise RequestError(f"{param} is a {type(schema).__name__}, a JSON schema is an object", param=param)
    return schema


def _on_one_line(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with `JSON_FORM`, but for what it says of that itself."""
    given = schema.get("x-guidance")
    return {**schema, "x-guidance": {**JSON_FORM, **(given if isinstance(given, dict) else {})}}


def _choices(text: str, param: str) -> list[str]:
    try:
        choices = msgspec.json.decode(text, type=list[str])
    except UNREADABLE as error:
        raise RequestError(f"{param} is no list of texts: {str(error)[:200]}", param=param) from error
    if not 0 < len(choices) <= MAX_CHOICES or not all(choices):
        raise RequestError(f"{param} has {len(choices)} texts; 1 to {MAX_CHOICES}, none of them empty", param=param)
    return choices


def _of_regex(text: str) -> str:
    from llguidance import LLMatcher

    inner: str = json.loads(LLMatcher.grammar_from_regex(text))["grammars"][0]["lark_grammar"]
    return inner


def _lark(text: str, param: str) -> str:
    """Lark as it is; GBNF, llama.cpp's form, is translated."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(text)
    except ValueError as error:  # of a number of more digits than Python reads
        raise RequestError(f"{param} has a number of too many digits", "repeat less often", param) from error
    except Exception as error:  # the library raises exactly this where a rule is missing
        raise RequestError(f"{param} is neither Lark nor GBNF: {_one_line(str(error))}", param=param) from error


def _limits() -> LLParserLimits:
    """About 10 ms to begin, as the library's authors say, and 100 MB of states at the most."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=500_000,
        step_lexer_fuel=200_000,
        max_grammar_size=100_000,
        max_lexer_states=50_000,
        verbose_errors=False,
    )


def _one_line(text: str) -> str:
    """A message of the library without the grammar, or the numbered lines of it, that it repeats."""
    return " ".join(re.split(r"\n(?:<| *\d+ \| )", text, maxsplit=1)[0].split())[:300]
