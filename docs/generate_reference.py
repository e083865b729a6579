"""Writes docs/reference from the code: commands, keys of a job, metrics, routes. Run from the repository's root:

    PYTHONPATH=src python docs/generate_reference.py

What the code has no words for (introductions, fields of requests) stands in docs/reference/meanings.toml; a name that
is in only one of the two ends this program with an error. A test (tests/house/test_reference.py) finds pages that are
out of date.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import os
import re
import textwrap
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import msgspec.inspect as types
from prometheus_client import Metric
from starlette.routing import Route

import tllm
from tllm.api.engine_options import EngineArgs
from tllm.cli.arguments.parser import Parser
from tllm.cli.main import COMMANDS, module_of
from tllm.server import app as server_app
from tllm.server.admission.token_bucket import UNLIMITED
from tllm.server.anthropic import requests as messages
from tllm.server.anthropic.routes import MessagesRoutes
from tllm.server.http.engine_statistics import COUNTERS, GAUGES, MEANINGS
from tllm.server.http.errors import ErrorInfo
from tllm.server.http.metrics import Metrics
from tllm.server.http.settings import RequestLimits, ServerSettings
from tllm.server.ollama import requests as ollama_requests
from tllm.server.ollama.routes import OllamaRoutes
from tllm.server.openai import lora_adapters, reply_format, requests, responses_request
from tllm.server.pooling import requests as pooling_requests
from tllm.server.pooling.routes import PoolingRoutes
from tllm.server.stored.routes import ReplyRoutes
from tllm.text.generation_config import NO_DEFAULTS
from tllm.training.job.job import LIMITS, Job
from tllm.training.job.job_file import TABLES, TYPES
from tllm.training.job.key_limits import KeyLimits
from tllm.training.job.lr_schedule import SHAPES
from tllm.training.report.metrics import StepRecord

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "reference"
SOURCE = ROOT / "src" / "tllm"
COMMAND = "PYTHONPATH=src python docs/generate_reference.py"
NOTE = "<!-- Made from the code by docs/generate_reference.py: do not edit this page. -->\n"
NONE = "–"
LINE = 100
"""Characters of a signature that is written on one line."""

REQUEST_KINDS: tuple[type[msgspec.Struct], ...] = (
    requests.SamplingFields,
    requests.CompletionRequest,
    requests.ChatRequest,
    requests.StreamOptions,
    requests.RequestMessage,
    requests.ContentPart,
    requests.TokenizeRequest,
    requests.DetokenizeRequest,
    pooling_requests.EmbeddingRequest,
    pooling_requests.ClassificationRequest,
    pooling_requests.ScoreRequest,
    pooling_requests.RerankRequest,
    pooling_requests.RerankDocument,
    responses_request.ResponsesRequest,
    lora_adapters.LoadLoraRequest,
    lora_adapters.UnloadLoraRequest,
    messages.CountTokensRequest,
    messages.MessagesRequest,
    ollama_requests.OllamaRequest,
    ollama_requests.OllamaOptions,
    ollama_requests.OllamaChatRequest,
    ollama_requests.OllamaGenerateRequest,
    ollama_requests.OllamaModelRequest,
    ollama_requests.OllamaEmbedRequest,
    ollama_requests.OllamaEmbeddingsRequest,
)
REPLY_KINDS: tuple[type[msgspec.Struct], ...] = (
    reply_format.ApiReply,
    reply_format.Usage,
    reply_format.PromptTokensDetails,
    reply_format.CompletionChoice,
    reply_format.ChatChoice,
    reply_format.ChatChunkChoice,
)
"""Structs that the page of the HTTP interface has a table of, in this order."""

Meanings = Mapping[str, Any]
"""The tables of meanings.toml."""


def main() -> None:
    """Write every page."""
    for name, text in pages().items():
        (FOLDER / name).write_text(text)


def pages() -> dict[str, str]:
    """Each page's name in docs/reference, and its text as the code is now."""
    meanings = tomllib.loads((FOLDER / "meanings.toml").read_text())
    made = {
        "commands.md": commands_page(meanings),
        "job-keys.md": job_page(meanings),
        "metrics.md": metrics_page(meanings),
        "http.md": http_page(meanings),
        "python.md": python_page(meanings),
        "api-surface.md": surface_page(meanings),
    }
    return {name: NOTE + "\n" + wrapped(page) + "\n" for name, page in made.items()}


# Commands ------------------------------------------------------------------------------------------------------------


def commands_page(meanings: Meanings) -> str:
    """Every command: usage, arguments, options, defaults."""
    groups = meanings["command_groups"]
    check_names("command_groups", [name for group in groups.values() for name in group], COMMANDS)
    lines = ["# Commands", *introduction("commands", meanings)]
    for title, names in groups.items():
        rows = [[f"[`tllm {name}`](#tllm-{name})", COMMANDS[name]] for name in names]
        lines += ["", f"**{title}**", "", *table(["command", "does"], rows)]
    for name in [name for group in groups.values() for name in group]:
        lines += ["", f"## tllm {name}", "", *command_section(name)]
    return "\n".join(lines)


def command_section(name: str) -> Iterator[str]:
    """One command, from its own parser."""
    module = importlib.import_module(module_of(name))
    parser = Parser(prog=f"tllm {name}", description=module.__doc__ or "")
    with patch.dict(os.environ, {"XDG_CACHE_HOME": "~/.cache"}):  # not the home folder of whoever runs this
        module.add_arguments(parser)
    # argparse has no public list of what was added to a parser, nor of its groups
    groups = [
        (group.title, [a for a in group._group_actions if a.help != argparse.SUPPRESS and a.dest != "help"])
        for group in parser._action_groups
    ]
    optional = {"?": "[{}]", "*": "[{} …]"}
    words = [optional.get(str(a.nargs), "{}").format(metavar(a)) for a in parser._actions if not a.option_strings]
    needed = [f"{a.option_strings[-1]} {metavar(a)}" for a in parser._actions if a.option_strings and a.required]
    yield from ["```text", " ".join(["tllm", name, *words, *needed, "[OPTIONS]"]), "```", ""]
    yield from prose(inspect.cleandoc(module.__doc__ or ""))
    exclusive = [[a.option_strings[-1] for a in g._group_actions] for g in parser._mutually_exclusive_groups]
    for title, actions in groups:
        rows = [argument_row(action, parser.prog, exclusive) for action in actions]
        if rows:
            heading = {"options": "Options", "positional arguments": "Arguments"}.get(str(title), str(title))
            yield from ["", f"**{heading[0].upper()}{heading[1:]}**", ""]
            yield from table(["argument" if heading == "Arguments" else "option", "default", "meaning"], rows)


def argument_row(action: argparse.Action, prog: str, exclusive: list[list[str]]) -> list[str]:
    """An argument's name, default and meaning."""
    value = metavar(action) if action.nargs != 0 else ""
    shown = value if not action.option_strings else f"{', '.join(action.option_strings)} {value}".strip()
    text = re.sub(r"\s*\(%\(default\)[sg]\)", "", action.help or "")  # the default has a column of its own
    text = text.replace("%(default)s; ", "") % {**vars(action), "prog": prog}
    for group in exclusive:
        if set(action.option_strings) & set(group):
            others = [f"`{name}`" for name in group if name not in action.option_strings]
            text += f"; not with {', '.join(others)}"
    if action.required and action.option_strings:
        text += "; needed"
    return [f"`{shown}`", default_of(action), markdown(text.strip("; ")) or NONE]


def metavar(action: argparse.Action) -> str:
    """What stands for a value in usage lines: its name, or all that it may be."""
    if action.metavar is None and action.choices is not None:
        return "{" + ",".join(map(str, action.choices)) + "}"
    return str(action.metavar or action.dest.upper())


def default_of(action: argparse.Action) -> str:
    """A default as one would type it."""
    if action.nargs == 0:
        return "`on`" if action.default is True else "`off`"
    if action.default in (None, [], (), ""):
        return NONE
    if isinstance(action.default, Path) and action.default.is_absolute():
        if not action.default.is_relative_to(ROOT):
            raise ValueError(f"{action.default} is not in {ROOT}: import tllm from there, with PYTHONPATH=src")
        return f"`{action.default.relative_to(ROOT)}` of this repository"
    if action.metavar == "SIZE" and isinstance(action.default, int) and action.default % (1 << 20) == 0:
        unit, name = (1 << 30, "GiB") if action.default % (1 << 30) == 0 else (1 << 20, "MiB")
        return f"`{action.default // unit}{name}`"
    if isinstance(action.default, float):
        return f"`{action.default:g}`"
    return "`" + str(action.default).replace("\n", "\\n") + "`"


# Python -------------------------------------------------------------------------------------------------------------


def python_page(meanings: Meanings) -> str:
    """Every name that `import tllm` offers, with its signature, fields and public methods."""
    names = [name for name in tllm.__all__ if not name.startswith("_")]
    lines = ["# Python", *introduction("python", meanings)]
    for name in sorted(names, key=str.lower):
        lines += [
            "",
            f"## {name}",
            "",
            *python_section(name, getattr(importlib.import_module(tllm.PLACES[name]), name)),
        ]
    return "\n".join(lines)


def python_section(name: str, thing: Any) -> Iterator[str]:
    """A class with its constructor, fields and methods, or a function."""
    if inspect.isfunction(thing):
        yield from [*signature(name, thing), *python_docs(thing)]
    elif is_record(thing):
        rows = [
            [f"`{field}`", f"`{kind}`", f"`{value}`" if value else "needed"] for field, kind, value in record(thing)
        ]
        yield from [*python_docs(thing), "", *table(["field", "type", "default"], rows)]
    else:
        yield from [*signature(name, thing.__init__), *python_docs(thing)]
        for method, member in vars(thing).items():
            called = getattr(member, "func", getattr(member, "fget", member))  # of a property, cached or not
            if method.startswith("_") or not inspect.isfunction(called):
                continue
            yield from ["", f"### {name}.{method}", ""]
            yield from signature(method, called) if called is member else ()
            yield from python_docs(called)
    if name == "LLM":
        docs = field_docs(EngineArgs)
        rows = [[f"`{argument}`", f"`{kind}`", markdown(docs[argument])] for argument, kind, _ in record(EngineArgs)]
        yield from ["", "### Arguments of an engine", "", *table(["argument", "type", "meaning"], rows)]


def is_record(thing: type) -> bool:
    return is_dataclass(thing) or issubclass(thing, msgspec.Struct)


def record(kind: type) -> list[tuple[str, str, str]]:
    """Each field of a record: its name, its type and its default as the source writes them."""
    tree = ast.parse(inspect.getsource(kind)).body[0]
    assert isinstance(tree, ast.ClassDef)
    return [
        (
            node.target.id,
            ast.unparse(node.annotation).replace("|", "\\|"),
            ast.unparse(node.value) if node.value else "",
        )
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]


def signature(name: str, function: Any) -> Iterator[str]:
    """A signature without `self`, its types as the source writes them; a long one with a line for each parameter."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(tree, ast.FunctionDef | ast.AsyncFunctionDef)
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    texts = dict(argument_texts(tree.args))
    keyword_only = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    words = [text for p in parameters for text in (["*"] if keyword_only[:1] == [p.name] else []) + [texts[p.name]]]
    is_plain = tree.returns is None or ast.unparse(tree.returns) == "None"
    result = "" if is_plain else f" -> {ast.unparse(tree.returns)}"  # type: ignore[arg-type]  # it is not None
    line = f"{name}({', '.join(words)}){result}"
    lines = [line] if len(line) <= LINE else [f"{name}(", *(f"    {word}," for word in words), f"){result}"]
    yield from ["```python", *lines, "```", ""]


def argument_texts(arguments: ast.arguments) -> Iterator[tuple[str, str]]:
    """Each parameter's name, and its text with type and default."""
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(plain) - len(arguments.defaults)) + list(arguments.defaults)
    for argument, default in zip([*plain, *arguments.kwonlyargs], [*defaults, *arguments.kw_defaults], strict=True):
        yield argument.arg, ast.unparse(argument) + (f" = {ast.unparse(default)}" if default is not None else "")
    for argument, stars in ((arguments.vararg, "*"), (arguments.kwarg, "**")):
        if argument is not None:
            yield argument.arg, stars + ast.unparse(argument)


def python_docs(thing: Any) -> list[str]:
    """A docstring as Markdown: its indented examples are code."""
    lines: list[str] = []
    text = inspect.cleandoc(thing.__doc__ or "")
    for block in text.split("\n\n"):
        is_code = all(line.startswith("    ") for line in block.splitlines())
        lines += ["```python", textwrap.dedent(block), "```", ""] if is_code else [*block.splitlines(), ""]
    return lines[:-1]


# Keys of a job -------------------------------------------------------------------------------------------------------


def job_page(meanings: Meanings) -> str:
    """Every key of a training job, by groups."""
    groups = meanings["job_groups"]
    own = [field.name for field in fields(Job) if field.name not in TABLES]
    check_names("job_groups", [key for group in groups.values() for key in group], own)
    lines = ["# Keys of a training job", *introduction("job_keys", meanings)]
    for title, keys in groups.items():
        lines += ["", f"## {title}", "", *key_table(Job, keys, LIMITS)]
    for name, kind in TABLES.items():
        keys = [field.name for field in fields(kind)]
        lines += ["", f"## [{name}]", "", *python_docs(kind), "", *key_table(kind, keys, kind.LIMITS, f"{name}.")]
    return "\n".join(lines)


def key_table(kind: type, keys: Iterable[str], limits: KeyLimits, prefix: str = "") -> list[str]:
    """The rows of some keys of a job, or of a table in it."""
    docs, defaults = field_docs(kind), {field.name: field.default for field in fields(kind)}
    rows = [
        [f"`{key}`", type_name(TYPES[prefix + key]) + said(limits, key), toml_value(defaults[key]), markdown(docs[key])]
        for key in keys
    ]
    return table(["key", "type and range", "default", "meaning"], rows)


def field_docs(kind: type) -> dict[str, str]:
    """The text beneath each field of a class, and of those that it has its fields from."""
    found = {}
    for owner in reversed([one for one in kind.__mro__ if one is kind or is_dataclass(one)]):
        tree = ast.parse(inspect.getsource(owner)).body[0]
        assert isinstance(tree, ast.ClassDef)
        for one, after in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and isinstance(after, ast.Expr):
                assert isinstance(after.value, ast.Constant)
                found[one.target.id] = " ".join(str(after.value.value).split())
    return found


def type_name(annotation: Any) -> str:
    """A type as TOML calls it."""
    text = str(getattr(annotation, "__name__", annotation)) if isinstance(annotation, type) else str(annotation)
    words = {"str": "text", "int": "integer", "float": "number", "bool": "boolean"}
    many = "list of pairs of " if "tuple[tuple" in text else "list of " if "tuple" in text else ""
    kind = next(word for name, word in words.items() if re.search(rf"\b{name}\b", text))
    return many + (f"{kind}s" if many else kind)


def said(limits: KeyLimits, key: str) -> str:
    """The range that a key is held to."""
    kinds, below = {**limits.choices, "lr_scheduler_type": tuple(SHAPES)}, limits.below
    said = [f"at least {limits.at_least[key]:g}"] if key in limits.at_least else []
    said += [f"less than {'2^63' if below[key] == 2**63 else f'{below[key]:g}'}"] if key in below else []
    said += ["one of " + ", ".join(f'`"{kind}"`' for kind in kinds[key])] if key in kinds else []
    return ", " + ", ".join(said) if said else ""


def toml_value(value: Any) -> str:
    """A default as a job file has it."""
    if value is MISSING:
        return "needed"
    if value is None:
        return NONE
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return (
        f"`{list(value)}`" if isinstance(value, tuple) else f'`"{value}"`' if isinstance(value, str) else f"`{value}`"
    )


# Metrics -------------------------------------------------------------------------------------------------------------


def metrics_page(meanings: Meanings) -> str:
    """What a server counts, and what a training run writes down."""
    record = meanings["step_record"]
    check_names("step_record", record, StepRecord.__struct_fields__)
    steps = [[f"`{f.name}`", msgspec_type(f.type), markdown(record[f.name])] for f in struct_fields(StepRecord)]
    lines = ["# Metrics", "", "## A server: /metrics", *introduction("server_metrics", meanings), ""]
    lines += [*table(["name", "type", "labels", "meaning"], metric_rows()), ""]
    lines += ["## A training run: metrics.jsonl", *introduction("run_metrics", meanings), ""]
    lines += table(["field", "type", "meaning"], steps)
    return "\n".join(lines)


def metric_rows() -> list[list[str]]:
    """A server's metrics, from its own registry, to which all statistics are told."""
    told = (*GAUGES, *COUNTERS, *MEANINGS)
    check_names("statistics", told, statistics(), "src/tllm/server/http/engine_statistics.py")
    labelled = {"weights_bytes": "weights_bytes/NODE/SOURCE"}
    labelled |= {name: f"{name}/NODE" for name in ("memory_bytes", "rss_bytes", "peak_bytes")}
    metrics = Metrics("MODEL")
    metrics.sequences.finished("stop")
    metrics.keys.admitted("KEY")
    metrics.keys.refused("KEY", "LIMIT")
    metrics.keys.used("KEY", 0, 0, 0)
    metrics.keys.file(0, False)
    metrics.render({labelled.get(key, key): 0.0 for key in told})
    rows = [metric_row(metric) for metric in metrics.registry.collect()]
    return sorted(rows, key=lambda row: row[0].strip("`"))


def metric_row(metric: Metric) -> list[str]:
    """One metric, in the words that Prometheus is told."""
    labels = dict.fromkeys(label for sample in metric.samples for label in sample.labels if label != "le")
    name = metric.name + ("_total" if metric.type == "counter" else "")
    told = markdown(metric.documentation)
    return [f"`{name}`", metric.type, ", ".join(f"`{label}`" for label in labels) or NONE, told]


def statistics() -> set[str]:
    """Every key of what functions named `stats` or `engine_stats` of the serving parts return."""
    files = [*(SOURCE / "engine").rglob("*.py"), *(SOURCE / "node" / "coordinator").glob("*.py")]
    files += [*(SOURCE / "node" / "serve").glob("*.py"), SOURCE / "node" / "roles" / "compressed_ring.py"]
    keys: set[str] = set()
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name in ("stats", "engine_stats", "_stats"):
                keys |= {
                    key for one in ast.walk(node) if isinstance(one, ast.Dict | ast.DictComp) for key in names(one)
                }
    return keys | {"refused_links", "refused_frames", "narrow_error", "memory_bytes", "rss_bytes", "peak_bytes"}


def names(made: ast.Dict | ast.DictComp) -> Iterator[str]:
    """Keys of a dict that are written out; of `f"weights_bytes/{node}"` what stands before the stroke."""
    for key in made.keys if isinstance(made, ast.Dict) else [made.key]:
        first = key.values[0] if isinstance(key, ast.JoinedStr) else key
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            yield first.value.rstrip("/").split("/")[0]


# HTTP ----------------------------------------------------------------------------------------------------------------


def http_page(meanings: Meanings) -> str:
    """Routes, requests, replies, errors, limits."""
    # only the tables are asked for
    own = server_app._Routes(None, None, None, None, None, None)  # type: ignore[arg-type]
    messages, ollama = MessagesRoutes(None), OllamaRoutes(None, None, None, None, 0)  # type: ignore[arg-type]
    pooled = PoolingRoutes(None, None, None, None, None)  # type: ignore[arg-type]
    lora = lora_adapters.LoraRoutes(lora_adapters.NoAdapters())
    prepare = {**own.prepare(), **messages.prepare()}
    replies = ReplyRoutes(prepare, None, None)  # type: ignore[arg-type]
    routes = defaultdict[str, list[Route]](list)
    for route in (route for part in (own, replies, messages, pooled, ollama, lora) for route in part.table()):
        routes[route.path].append(route)
    check_names("routes", meanings["routes"], routes)
    rows = []
    for path, of_path in sorted(routes.items()):
        body = request_of(prepare.get(path, of_path[0].endpoint))
        shown = path.replace("{name:path}", "NAME").replace("{id}", "ID")
        takes = f"[{body}](#{body.lower()})" if body else NONE
        methods = ", ".join(sorted({method for route in of_path for method in route.methods or ()} - {"HEAD"}))
        rows.append([f"`{methods} {shown}`", takes, markdown(meanings["routes"][path])])
    lines = ["# HTTP interface", *introduction("http", meanings), "", "## Routes", ""]
    lines += [*table(["route", "takes", "answers"], rows), "", "## Requests", *introduction("requests", meanings)]
    for kind in REQUEST_KINDS:
        lines += ["", f"### {kind.__name__}", "", *request_section(kind, meanings)]
    lines += ["", "## Replies", *introduction("replies", meanings)]
    for kind in REPLY_KINDS:
        doc = markdown(inspect.getdoc(kind) or "")
        lines += ["", f"### {kind.__name__}", "", doc, "", *reply_table(kind, meanings)]
    lines += ["", "## Errors", *introduction("errors", meanings), ""]
    lines += table(["status", "code", "type", "when"], error_rows(meanings))
    lines += ["", "### ErrorInfo", "", *reply_table(ErrorInfo, meanings)]
    settings = {field.name: field.default for field in fields(ServerSettings)}
    check_names("settings", meanings["settings"], settings)
    rows = [[f"`{name}`", setting(value), markdown(meanings["settings"][name])] for name, value in settings.items()]
    lines += ["", "## Settings and limits", *introduction("settings", meanings), ""]
    lines += table(["setting", "default", "meaning"], rows)
    limits = {field.name: field.default for field in fields(RequestLimits)}
    check_names("limits", meanings["limits"], limits)
    rows = [[f"`{name}`", setting(value), markdown(meanings["limits"][name])] for name, value in limits.items()]
    lines += ["", "### Largest requests", *introduction("limits", meanings), ""]
    lines += table(["setting", "default", "meaning"], rows)
    return "\n".join(lines)


def surface_page(meanings: Meanings) -> str:
    """What becomes of every parameter of the official clients, as api-surface.toml has it."""
    lines = ["# Parameters of the official clients", *introduction("api_surface", meanings)]
    for name, method in tomllib.loads((FOLDER / "api-surface.toml").read_text()).items():
        rows = []
        for parameter, stated in method["parameters"].items():
            outcome, _, words = stated.partition(": ")
            rows.append([f"`{parameter}`", outcome, markdown(words) or NONE])
        lines += ["", f"## {name}", "", f"`{method['route']}`" if "/" in method["route"] else method["route"], ""]
        lines += table(["parameter", "outcome", "how, or why"], rows)
    return "\n".join(lines)


def request_of(endpoint: Callable[..., Any]) -> str:
    """The type that a route decodes its body as."""
    found = re.search(r"decode\((?:await \w+\.)?body(?:\(\))?, (\w+)\)", inspect.getsource(endpoint))
    return found[1] if found else ""


def request_section(kind: type[msgspec.Struct], meanings: Meanings) -> Iterator[str]:
    """The fields of a request that are its own, with their defaults, and those it refuses."""
    yield markdown(inspect.getdoc(kind) or "")
    for base in (base.__name__ for base in kind.__bases__ if base in REQUEST_KINDS):
        yield f"It also has every field of [{base}](#{base.lower()})."
    refused = [name for name, mark in kind.__annotations__.items() if mark == "Refused"]
    own = [f for f in struct_fields(kind) if f.name in kind.__annotations__ and f.name not in refused]
    told = meanings["fields"][kind.__name__]
    check_names(f"fields.{kind.__name__}", told, [field.name for field in own])
    rows = [[f"`{f.name}`", msgspec_type(f.type), request_default(kind, f.name), markdown(told[f.name])] for f in own]
    yield from ["", *table(["field", "type and range", "default", "meaning"], rows)]
    if refused:
        yield from ["", "Refused: " + ", ".join(f"`{name}`" for name in refused) + "."]


def request_default(kind: type[msgspec.Struct], name: str) -> str:
    """What the sampler takes where a request leaves a field out."""
    taken = requests.CompletionRequest(prompt="").sampling_params(16, 0, (), None)
    if kind is not requests.SamplingFields or name not in taken.__struct_fields__ or name in ("seed", "max_tokens"):
        return NONE
    value = getattr(taken, name)
    return NONE if value in ((), {}) else f"`{str(value).lower()}`"


def reply_table(kind: type[msgspec.Struct], meanings: Meanings) -> list[str]:
    """The fields of a reply."""
    told = meanings["fields"][kind.__name__]
    check_names(f"fields.{kind.__name__}", told, kind.__struct_fields__)
    rows = [[f"`{f.name}`", msgspec_type(f.type), markdown(told[f.name])] for f in struct_fields(kind)]
    return table(["field", "type", "meaning"], rows)


def struct_fields(kind: type[msgspec.Struct]) -> tuple[types.Field, ...]:
    """A struct's fields with their types and ranges."""
    known = types.type_info(kind)
    assert isinstance(known, types.StructType)
    return known.fields


def msgspec_type(kind: types.Type) -> str:
    """A type and its range in words; null and "left out" are not said of every field."""
    if isinstance(kind, types.UnionType):
        kinds = [msgspec_type(k) for k in kind.types if not isinstance(k, types.NoneType) and "Unset" not in repr(k)]
        return " or ".join(kinds)
    if isinstance(kind, types.ListType):
        most = f", at most {kind.max_length}" if kind.max_length else ""
        item = msgspec_type(kind.item_type)
        return f"list of {f'({item})' if ' or ' in item else item}{most}"
    if isinstance(kind, types.DictType):
        return f"object: {msgspec_type(kind.key_type)} to {msgspec_type(kind.value_type)}"
    if isinstance(kind, types.StructType):
        known = {one.__name__ for one in (*REQUEST_KINDS, *REPLY_KINDS)}
        name = kind.cls.__name__
        return f"[{name}](#{name.lower()})" if name in known else f"{name} object"
    words = {types.StrType: "text", types.IntType: "integer", types.FloatType: "number", types.BoolType: "boolean"}
    return words.get(type(kind), "any value") + number_range(kind)


def number_range(kind: types.Type) -> str:
    """`, 0 to 20` for a number, `, 1 to 64 characters` for a text."""
    if isinstance(kind, types.StrType) and kind.max_length:
        return f", {kind.min_length or 0} to {kind.max_length} characters"
    if not isinstance(kind, types.IntType | types.FloatType):
        return ""
    low, high = kind.gt if kind.ge is None else kind.ge, kind.lt if kind.le is None else kind.le
    if low is None or high is None:
        return ""
    if kind.gt is not None:
        return f", above {power(low)} and up to {power(high)}"
    return f", {power(low)} to {'' if kind.lt is None else 'below '}{power(high)}"


def power(value: float) -> str:
    """2^31 rather than ten digits."""
    for exponent in (31, 63):
        for sign, number in (("", 1 << exponent), ("-", -(1 << exponent))):
            if value == number:
                return f"{sign}2^{exponent}"
            if value == number - 1:
                return f"{sign}2^{exponent} - 1"
    return f"{value:g}"


def setting(value: Any) -> str:
    """A setting's default; lists are empty."""
    if value in ((), "", UNLIMITED, RequestLimits(), NO_DEFAULTS):
        return NONE
    if isinstance(value, int) and value >= 1 << 15 and value != RequestLimits().max_json_containers:
        return f"`{value >> 20} MiB`" if value >= 1 << 20 else f"`{value >> 10} KiB`"
    return f"`{value:g} s`" if isinstance(value, float) else f"`{value}`"


def error_rows(meanings: Meanings) -> list[list[str]]:
    """The table of errors, once it is known that each code in the source is in it."""
    told = meanings["errors"]
    listed = {key.split()[1] for key in told} - {"-"}
    check_names("errors (codes)", listed, {*error_codes(), "engine_error", "engine_cancelled"})
    return [
        [status, NONE if code == "-" else f"`{code}`", f"`{kind}`", markdown(when)]
        for (status, code), (kind, when) in sorted((tuple(key.split()), value) for key, value in told.items())
    ]


def error_codes() -> set[str]:
    """The codes of every `HttpError(status, message, kind, code)` and `_unwell(message, code, …)` of the server."""
    found = set()
    for path in (SOURCE / "server").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("HttpError", "_unwell")
            ):
                place = 3 if node.func.id == "HttpError" else 1
                given = [word.value for word in node.keywords if word.arg == "code"] + node.args[place : place + 1]
                found |= {one.value for one in given if isinstance(one, ast.Constant) and one.value is not None}
    return {str(code) for code in found}


def introduction(name: str, meanings: Meanings) -> list[str]:
    """An introduction, as lines of a page."""
    return ["", *meanings["text"][name].strip().splitlines()]


# Markdown ------------------------------------------------------------------------------------------------------------


def wrapped(page: str) -> str:
    """The page with each paragraph broken into lines of at most 118 characters; headings, tables and code stay."""
    blocks = re.split(r"\n\n+", page.strip())
    return "\n\n".join(
        block
        if block.startswith(("|", "#", "```"))
        else textwrap.fill(" ".join(block.split()), 118, break_on_hyphens=False, break_long_words=False)
        for block in blocks
    )


def check_names(
    table_name: str, told: Iterable[str], found: Iterable[str], where: str = "docs/reference/meanings.toml"
) -> None:
    """Every name has a meaning, and every meaning a name. ValueError."""
    lacking, spare = sorted(set(found) - set(told)), sorted(set(told) - set(found))
    if lacking or spare:
        raise ValueError(f"{where}, [{table_name}]: add {lacking}, take out {spare}")


def table(head: list[str], rows: Iterable[list[str]]) -> list[str]:
    """A table; strokes inside cells are escaped."""
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return ["| " + " | ".join(line) + " |" for line in lines]


def prose(text: str) -> list[str]:
    """Paragraphs of a docstring; what is indented becomes a block of code."""
    made = []
    for part in re.split(r"\n\s*\n", text):
        is_code = all(line.startswith("    ") for line in part.splitlines())
        made += ["```text", *inspect.cleandoc(part).splitlines(), "```"] if is_code else [markdown(part)]
        made.append("")
    return made[:-1]


def markdown(text: str) -> str:
    """Help text as Markdown: options as code, so that two dashes stay two; pages as links; no accidental emphasis."""
    parts = re.split(r"(`[^`]*`|\[[^\]]*\]\([^)]*\))", text)
    return "".join(part if i % 2 else _plain(part) for i, part in enumerate(parts))


def _plain(text: str) -> str:
    text = text.replace("*", "\\*").replace("<", "&lt;")
    text = re.sub(r"\bdocs/(guides|reference)/([\w-]+\.md)", r"[docs/\1/\2](../\1/\2)", text)
    return re.sub(r"(?<![\w-])(--[a-z][a-z-]*(?: [A-Z]+\b)?)", r"`\1`", text)


if __name__ == "__main__":
    main()
