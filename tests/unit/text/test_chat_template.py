"""Chat templates: byte for byte what `transformers` renders, and a sandbox that a template cannot hang or leave."""

from __future__ import annotations

import itertools
import resource
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers

from tests.unit.text import kits
from tllm.core.errors import ConfigError, RequestError
from tllm.text import template_sandbox
from tllm.text.chat_template import ChatTemplate
from tllm.text.template_sandbox import MAX_OUTPUT
from tllm.text.tokenizer import Tokenizer

TEMPLATES = {
    "plain": (
        "{% for message in messages %}{{ '<|' + message.role + '|>' + message['content'] + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    ),
    "header": """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{% if tools %}
Tools:
    {% for tool in tools %}
        {{- tool | tojson(indent=4) }}
    {% endfor %}
{% endif %}
[system]{{ system }}[/system]
{% for message in messages %}
  {% if message.content is none %}{% continue %}{% endif %}
  {% if loop.index0 > 6 %}{% break %}{% endif %}
  [{{ message['role'] | upper }}] {{ message['content'] | trim }} <{{ loop.last }}>
{% endfor %}
{%- if add_generation_prompt %}
[ASSISTANT]{% endif %}
""",
    "thinking": """{%- set ns = namespace(last=-1, n=0) %}
{%- macro show(m) -%}
{{ m.role }}: {{ m.content }}{% if m.reasoning_content %} ({{ m.reasoning_content }}){% endif %}
{%- endmacro %}
{%- for m in messages[::-1] %}
{% if m.role == 'user' and ns.last < 0 %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- set ns.n = ns.n + 1 %}
{%- if m.role == 'assistant' %}{% generation %}{{ show(m) }}
{% endgeneration %}{% else %}{{ show(m) }}
{% endif %}
{%- endfor %}{{ ns.last }}/{{ ns.n }} {{ messages | map(attribute='role') | join(',') }} {{ messages | tojson }}
{%- if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}{{ dict(a=1).a }}""",
    "strict": (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must take turns') }}{% endif %}{{ m.content }}{% endfor %}{{ pad_token }}"
    ),
    "date": "{{ strftime_now('%Y') }}{{ messages[-1].content.split('</think>')[-1].lstrip('\\n') }}",
}
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hello <b>world</b> & \"all\" 'é' 🙂"}],
    [
        {"role": "system", "content": "  be kind \n"},
        {"role": "user", "content": "one\n\ntwo"},
        {"role": "assistant", "content": "three", "reasoning": "because"},
        {"role": "user", "content": " four "},
    ],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b</think>\n\nc"},
        {"role": "user", "content": ""},
    ],
]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "<sum> é", "parameters": {"type": "object"}}}]


def pair(folder: Path, template: Any) -> tuple[ChatTemplate, Any]:
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>", "__type": "AddedToken"}, "chat_template": template}
    kits.save(folder, kits.byte_level(), config)
    ours = ChatTemplate.from_folder(folder, Tokenizer.from_folder(folder))
    assert ours is not None
    return ours, transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "strict"])
def test_equal_to_transformers(name: str, tmp_path: Path) -> None:
    ours, theirs = pair(tmp_path, TEMPLATES[name])
    rendered = 0
    for chat in CHATS:
        for tools in (None, TOOLS):
            for prompt in (True, False):
                for extra in ({}, {"enable_thinking": False}):
                    expected = theirs.apply_chat_template(
                        chat, tools=tools, add_generation_prompt=prompt, tokenize=False, **extra
                    )
                    assert ours.render(chat, tools=tools, add_generation_prompt=prompt, **extra) == expected
                    rendered += 1
    assert rendered == 24


@pytest.mark.parametrize("name", ["plain", "header"])
def test_a_last_message_goes_on_as_with_transformers(name: str, tmp_path: Path) -> None:
    ours, theirs = pair(tmp_path, TEMPLATES[name])
    for content in ("The answer is", " spaced  ", "x\n"):
        chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": content}]
        expected = theirs.apply_chat_template(chat, continue_final_message=True, tokenize=False)
        assert ours.render(chat, add_generation_prompt=False, continue_final_message=True) == expected


def test_named_templates_and_a_file_of_its_own(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    ours, theirs = pair(tmp_path, named)
    chat = CHATS[0]
    assert ours.render(chat) == theirs.apply_chat_template(chat, tokenize=False) == "D"
    assert ours.render(chat, tools=TOOLS) == theirs.apply_chat_template(chat, tools=TOOLS, tokenize=False) == "T"
    (tmp_path / "chat_template.jinja").write_text("F", encoding="utf-8-sig")
    alone = ChatTemplate.from_folder(tmp_path, Tokenizer.from_folder(tmp_path))
    assert alone is not None
    assert alone.render(chat) == "F"
    (tmp_path / "chat_template.jinja").unlink()
    kits.save(
        tmp_path, kits.byte_level(), {"chat_template": [{"name": "a", "template": ""}, {"name": "b", "template": ""}]}
    )
    with pytest.raises(ConfigError, match="none called 'default'"):
        ChatTemplate.from_folder(tmp_path, Tokenizer.from_folder(tmp_path))
    kits.save(tmp_path, kits.byte_level(), {})
    assert ChatTemplate.from_folder(tmp_path, Tokenizer.from_folder(tmp_path)) is None


def test_a_templates_refusal_reaches_the_user() -> None:
    template = ChatTemplate(TEMPLATES["strict"])
    with pytest.raises(RequestError, match="roles must take turns"):
        template.render([{"role": "assistant", "content": "x"}])
    with pytest.raises(RequestError, match="chat template refuses"):
        ChatTemplate("{{ messages[0].content + 1 }}").render([{"role": "user", "content": "a"}])


@pytest.mark.parametrize("source", ["{% for %}", "{{ ", "{% include 'x' %}{% endif %}", "x" * (1 << 21)])
def test_what_is_not_a_template_is_a_config_error(source: str) -> None:
    with pytest.raises(ConfigError, match="chat template cannot be read"):
        ChatTemplate(source)


TOWERS = {
    "lists": "{% set n = namespace(a=['x' * 999], b=['x' * 999]) %}{% for i in range(40) %}"
    "{% set n.a = [n.a, n.a] %}{% set n.b = [n.b, n.b] %}{% endfor %}",
    "tuples": "{% set n = namespace(a=(1,)) %}{% for i in range(40) %}{% set n.a = (n.a, n.a) %}{% endfor %}",
    "numbers": "{% set n = namespace(a=10) %}{% for i in range(9) %}{% set n.a = n.a ** 64 %}{% endfor %}",
}
"""What is small and means very much."""

TOWERS_USED = (
    "{{ n }}",
    "{{ {1: n.a}.values() }}",
    "{{ n.a | upper | length }}",
    "{{ ('%s' % n.a) | length }}",
    "{{ '{}'.format(n.a) | length }}",
    "{{ n.a == n.b }}",
    "{{ n.a is eq(n.b) }}",
    "{{ [n.a, n.b] | unique | list | length }}",
    "{% set x = 'x' * 9000000 %}{{ ''.join([x] * 1000) | length }}",
    "{% set x = 'x' * 9000000 %}{{ ([x] * 1000) | map('string') | join | length }}",
    "{{ raise_exception(n.a) }}",
    "{{ [n.a].index(n.b) }}",
    "{{ [n.a].count(n.b) }}",
    "{{ 1 | attr(n.a) }}",
)

TOWERS_HASHED = (
    "{{ {}[n.a] }}",
    "{{ {}.get(n.a) }}",
    "{{ {n.a: 1} | length }}",
    "{{ n.a is filter }}",
    "{{ dict([(n.a, 1)]) }}",
)

HOSTILE = {
    "class": "{{ ''.__class__.__mro__ }}",
    "subclasses": "{{ ().__class__.__base__.__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__ }}",
    "cycler": "{{ cycler.__init__.__globals__.os }}",
    "namespace": "{% set ns = namespace(__class__=1) %}{{ ns }}",
    "namespace set": "{% set ns = namespace() %}{% set ns.__x__ = 1 %}{{ ns }}",
    "format": "{{ '{0.__class__.__init__}'.format(messages) }}",
    "append": "{{ messages.append(1) }}",
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "lists": "{% set x = range(99999) | list %}{% for a in x %}{% for b in x %}{% endfor %}{% endfor %}",
    "output": "{% for a in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
    "repeat": "{{ 'x' * 10 ** 12 }}",
    "power": "{{ 10 ** 10 ** 10 }}",
    "macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "deep": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "doubling": "{% set n = namespace(s='xx') %}{% for i in range(90) %}{% set n.s = n.s + n.s %}{% endfor %}{{ n.s }}",
    "pad": "{{ 'x'.ljust(10000000000) }}",
    "replace": "{% set x = 'x' * 100000 %}{{ x.replace('x', x) }}",
    "range": "{{ range(10000000000) | list }}",
    "width": "{{ '%02000000000d' % 1 }}",
    "star": "{{ '%*d' % (2000000000, 1) }}",
    "brace": "{{ '{:>2000000000}'.format(1) }}",
    "filter width": "{{ '%02000000000d' | format(1) }}",
    "center": "{{ 'x' | center(2000000000) }}",
    "indent": "{{ [1] | tojson(indent=2000000000) }}",
    "batch of a constant": "{% set x = [1] | batch(1000000, 'x') | list %}{{ x | length }}",
    "indent of many": "{{ {'a': range(40000) | list} | tojson(indent=10000) | length }}",
    "batch": "{{ [1] | batch(2000000000, 'x') | list }}",
    "swap": "{% set x = 'x' * 1000000 %}{{ x | replace('x', x) }}",
    "joined": "{% set x = 'x' * 9000000 %}{{ ([x] * 1000) | join | length }}",
    "tilde": "{% set n = namespace(s='x' * 9000000) %}{% for i in range(9) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "block": "{% set x = 'x' * 9000000 %}{% set b %}" + "{{ x }}" * 90 + "{% endset %}",
    "own words": "{% set b %}{% for _ in range(4000) %}" + "x" * 100000 + "{% endfor %}{% endset %}{{ b | length }}",
    "nested": "{% set x = ['x' * 9000000] * 1000 %}{{ x }}",
    "tabs": "{{ 'a\tb'.expandtabs(tabsize=2000000000) | length }}",
    "date": "{{ strftime_now('%999d' * 400000) | length }}",
    "filler": "{{ lipsum(n=100000000) }}",
    "bytes": "{{ 'x'.encode().ljust(500000000) | length }}",
    "bytes of a number": "{{ (1).to_bytes(500000000, 'big') | length }}",
    "widths": "{{ (('%999999d' * 2000) % ((1,) * 2000)) | length }}",
    "braces": "{{ ('{0:999999}' * 2000).format(1) | length }}",
    "stars": "{{ (('%*d' * 200) % ((9999999, 1) * 200)) | length }}",
    "named": "{% set x = 'x' * 9000000 %}{{ (('%(a)s' * 1000) % {'a': x}) | length }}",
    "named filter": "{% set x = 'x' * 9000000 %}{{ ('%(a)s' * 1000) | format(a=x) | length }}",
    "listed": "{% set x = ['x' * 9000000] %}{{ ('{0}' * 1000).format(x) | length }}",
    "dates": "{{ strftime_now('%c' * 4000000) | length }}",
    "numbers": TOWERS["numbers"] + "{{ n.a % 7 }}",
    **{f"tower {use}": TOWERS["lists"] + use for use in TOWERS_USED},
    **{f"tower {use}": TOWERS["tuples"] + use for use in TOWERS_HASHED},
}


@pytest.mark.parametrize("name", list(HOSTILE))
def test_a_hostile_template_neither_hangs_nor_grows_nor_leaves(name: str) -> None:
    started, before = time.thread_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    template = ChatTemplate(HOSTILE[name])
    try:
        text = template.render(CHATS[0])
    except RequestError:
        text = ""
    assert time.thread_time() - started < 15, "one second, and what its last step takes"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 1024, "KiB"
    assert len(text) <= MAX_OUTPUT
    assert "class" not in text
    assert "module" not in text


def test_a_template_has_a_second_of_the_processor_whatever_the_clock_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stands still for a while had an honest template refused."""
    looks, used = itertools.count(step=10), iter((0.0, 0.5, 1.5))
    clocks = SimpleNamespace(monotonic=lambda: next(looks), thread_time=lambda: next(used))
    monkeypatch.setattr(template_sandbox, "time", clocks)
    with pytest.raises(RequestError, match="ran longer than it may"):
        ChatTemplate("{% for _ in range(2) %}{% endfor %}").render(CHATS[0])
    assert next(used, None) is None, "the loop went on after half a second"


@pytest.mark.parametrize(
    "made", ["x * (90000 + i)", "x * 90000 ~ i", "(x * 90000)[i:]", "(x * 90000) | upper", "[i] * 90000"]
)
def test_what_a_template_keeps_is_bounded_by_what_it_makes(made: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_MADE", 1 << 22)
    source = "{% set n = namespace(all=[]) %}{% set x = 'x' %}{% for i in range(300) %}{% set n.all = n.all + [MADE] %}"
    template = ChatTemplate(source.replace("MADE", made) + "{% endfor %}")
    with pytest.raises(RequestError, match="makes more than 4194304 bytes in all"):
        template.render(CHATS[0])


def test_messages_are_data_not_template() -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    assert template.render([{"role": "user", "content": "{{ 7 * 7 }}{% raw %}"}]) == "{{ 7 * 7 }}{% raw %}"


def test_a_long_honest_chat_is_rendered() -> None:
    template = ChatTemplate(TEMPLATES["plain"], {"eos_token": "</s>"})
    chat = [{"role": "user", "content": "word " * 2000}] * 300
    assert len(template.render(chat)) > 3_000_000
    numbers = "{{ '%d' % 1700000000 }} {{ n | default(1700000000) }} {{ '{:>8}'.format(5) }} {{ 1 ~ none ~ 'x' }}"
    assert ChatTemplate(numbers).render(chat) == "1700000000 1700000000        5 1Nonex"
