"""Two texts as the prompt by which a model scores them.

A generative reranker is asked whether a document meets a query, in the words of Qwen3-Reranker (2506.05176 and its
model card), and the log-probabilities of "yes" and "no" are its answer. A model with a classification head gets both
texts as its tokenizer joins a pair.
"""

from __future__ import annotations

from tllm.core.errors import RequestError
from tllm.text.chat_template import ChatTemplate
from tllm.text.tokenizer import Tokenizer

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
BEFORE = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n"
AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


class ScorePrompts:
    """Makes prompts with a model's tokenizer. One that lacks `<|im_start|>` is asked through its chat template."""

    def __init__(self, tokenizer: Tokenizer | None, template: ChatTemplate | None, answers: tuple[str, str]) -> None:
        self._tokenizer, self._template, self._answers = tokenizer, template, answers

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; RequestError where the model has none."""
        if self._tokenizer is None:
            raise RequestError("texts need a tokenizer and this model's folder has none", "send token ids", "input")
        return self._tokenizer

    def pair(self, text: str, other: str) -> tuple[int, ...]:
        """Both texts, for a classification head."""
        return tuple(self.tokenizer.encode_pair(text, other))

    def question(self, query: str, document: str, instruction: str | None) -> tuple[int, ...]:
        """Whether the document meets the query."""
        asked = f"<Instruct>: {instruction or INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
        if self.tokenizer.id_of("<|im_start|>") is not None:
            pieces = (BEFORE, asked, AFTER)
        elif self._template is not None:
            messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": asked}]
            pieces = (self._template.render(messages, enable_thinking=False), "", "")
        else:
            raise RequestError(
                "a generative score needs a chat template and this model has none",
                """start the server with --pooler-config '{"score_type": "embedding"}', or with --chat-template FILE""",
            )
        return tuple(i for piece in pieces for i in self.tokenizer.encode(piece, add_special_tokens=False))

    def answer_ids(self) -> tuple[int, int]:
        """The ids of no and yes."""
        ids = [self.tokenizer.id_of(answer) for answer in self._answers]
        if ids[0] is None or ids[1] is None:
            missing = self._answers[ids.index(None)]
            raise RequestError(
                f"a generative score reads the token {missing!r}, which this model's tokenizer lacks",
                """start the server with --pooler-config '{"score_type": "embedding"}'""",
            )
        return ids[0], ids[1]
