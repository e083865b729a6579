"""The slow twin of completions with tools: a loop as anybody would write it, over `transformers` alone.

It is given what the model sampled in each turn, and finds out by itself which calls that has, what they come to, which
tokens the results are, and where the completion ends.
"""

from __future__ import annotations

import importlib.util
import json
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tests.support.models.reference_gradients import in_float64
from tllm.node.roles import colocated_rollouts as role
from tllm.spec.request import Output
from tllm.training.job.job import Job
from tllm.training.policy.rollouts import Completion, CompletionSampling, PromptGroup


@dataclass
class SampledTurns:
    """What engines sampled, by the seed of the completion: ids that stood before, those that came; and how many tokens
    of a prompt were found in the cache."""

    turns: dict[int, list[tuple[list[int], list[int]]]] = field(default_factory=dict)
    cached: dict[int, list[int]] = field(default_factory=dict)


def watch(monkeypatch: pytest.MonkeyPatch) -> SampledTurns:
    """Note what is sampled from now on."""
    seen, right, read = SampledTurns(), role.ColocatedRollouts.sample, role._completion
    found: dict[int, list[int]] = {}  # of each thread, which is a rank

    def completion(outputs: Sequence[Output]) -> Completion:
        found[threading.get_ident()].append(outputs[0].cached_tokens)
        return read(outputs)

    def sample(
        self: role.ColocatedRollouts,
        groups: Sequence[PromptGroup],
        stop_ids: Sequence[int],
        sampling: CompletionSampling,
    ) -> list[Completion]:
        cached_tokens = found[threading.get_ident()] = []
        completions = right(self, groups, stop_ids, sampling)
        each = [(group.ids, seed) for group in groups for seed in group.seeds]
        for (ids, seed), one, cached in zip(each, completions, cached_tokens, strict=True) if completions else ():
            seen.turns.setdefault(seed, []).append((list(ids), list(one.ids)))
            seen.cached.setdefault(seed, []).append(cached)
        return completions

    monkeypatch.setattr(role, "_completion", completion)
    monkeypatch.setattr(role.ColocatedRollouts, "sample", sample)
    return seen


def functions_of(file: Path) -> dict[str, Callable[..., Any]]:
    module_spec = importlib.util.spec_from_file_location(f"plain_{file.stem}", file)
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    return {name: value for name, value in vars(module).items() if callable(value)}


def tools_of(folder: Path) -> dict[str, Callable[..., Any]]:
    """Those of the task."""
    return {name: one for name, one in functions_of(folder / "tools.py").items() if name in ("look", "add")}


@dataclass
class PlainCompletion:
    """A completion by the loop."""

    prompt_ids: list[int]
    ids: list[int]
    mask: list[int]
    messages: list[dict[str, Any]]
    calls: int
    failures: int


def plain_completion(
    tools: dict[str, Callable[..., Any]],
    tokenizer: Any,
    sampled: Sequence[tuple[list[int], list[int]]],
    longest: int,
    iterations: int = 10**9,
) -> PlainCompletion:
    """All turns as one; an assertion where a turn was sampled after other ids, or there are too many or too few."""
    made = PlainCompletion(sampled[0][0], [], [], [], 0, 0)
    for number, (before, turn) in enumerate(sampled):
        is_last = number == len(sampled) - 1
        assert before == made.prompt_ids + made.ids
        made.ids += turn
        made.mask += [1] * len(turn)
        text = tokenizer.decode(turn, skip_special_tokens=True)
        calls = [json.loads(call) for call in re.findall(r"<tool_call>(.*?)</tool_call>", text)]
        said = re.sub(r"\s*<tool_call>.*?</tool_call>\s*", "", text)
        made.messages.append({"role": "assistant", "content": said} | ({"tool_calls": calls} if calls else {}))
        if not calls or turn[-1] != tokenizer.eos_token_id or number == iterations:
            assert is_last
            break
        results = [result_of(tools, call) for call in calls]
        made.calls += len(calls)
        made.failures += sum(result.startswith("{'error': ") for result in results)
        messages = [
            {"role": "tool", "name": call["name"], "content": result}
            for call, result in zip(calls, results, strict=True)
        ]
        suffix = suffix_of(tokenizer, messages)
        if len(made.ids) + len(suffix) > longest:
            assert is_last, "a result that has no room ends the completion"
            break
        made.messages += messages
        made.ids += suffix
        made.mask += [0] * len(suffix)
        assert is_last == (len(made.ids) == longest)
    return made


def result_of(tools: dict[str, Callable[..., Any]], call: dict[str, Any]) -> str:
    if call["name"] not in tools:
        return str({"error": f"Tool {call['name']} not found."})
    if not isinstance(call["arguments"], dict):
        return str({"error": f"The arguments are no JSON object: {call['arguments']}"})
    try:
        return str(tools[call["name"]](**call["arguments"]))
    except (KeyError, TypeError) as error:
        return str({"error": str(error)})


def suffix_of(tokenizer: Any, messages: list[dict[str, Any]]) -> list[int]:
    """As TRL finds it: a conversation up to a call, without what comes after its end, and the same with the results."""
    call = {"type": "function", "function": {"name": messages[0]["name"], "arguments": {}}}
    chat = [{"role": "user", "content": "dummy"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    before = tokenizer.apply_chat_template(chat, return_dict=False)
    whole = tokenizer.apply_chat_template(chat + messages, add_generation_prompt=True, return_dict=False)
    before = before[: len(before) - before[::-1].index(tokenizer.eos_token_id)]
    assert whole[: len(before)] == before
    return list(whole[len(before) :])


def plain_advantages(folder: Path, made: Sequence[PlainCompletion], size: int, names: Sequence[str]) -> Tensor:
    """Of groups of `size`, by the mean and the standard deviation of each."""
    rewards = functions_of(folder / "rewards.py")
    columns = dict(
        prompts=[None] * len(made),
        completions=[one.messages for one in made],
        completion_ids=[one.ids for one in made],
    )
    reward_PG = sum(torch.tensor(rewards[name](**columns), dtype=torch.float64) for name in names).view(-1, size)
    off_PG = reward_PG - reward_PG.mean(1, keepdim=True)
    return (off_PG / (reward_PG.std(1, keepdim=True) + 1e-4)).flatten()


def plain_steps(
    job: Job, model: transformers.PreTrainedModel, groups: Sequence[tuple[Sequence[PlainCompletion], Tensor]]
) -> list[float]:
    """The losses of GRPO (DAPO's sum over tokens) with `num_iterations` steps for each sampling; `model` is trained.

    With `max_staleness` each group was sampled with the weights of so many groups before, or the first: what is learned
    of a token is weighed by the ratio of its probability by the weights of its step, to that.
    """
    table = job.grpo
    assert table is not None
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.learning_rate, weight_decay=job.weight_decay)
    rates = transformers.get_scheduler(job.lr_scheduler_type, optimizer, 0, job.max_steps)
    reference = transformers.AutoModelForCausalLM.from_pretrained(str(job.model_name_or_path), dtype=torch.float64)
    losses = []
    with in_float64(reference), torch.no_grad():
        wanted = {id(one): own_log_probs(reference, one) for made, _ in groups for one in made}
    sampled: dict[int, Tensor] = {}
    with in_float64(model):
        for number, (made, advantages) in enumerate(groups):
            ahead = groups[number + bool(number) * table.max_staleness :][: 1 if number else table.max_staleness + 1]
            with torch.no_grad():
                sampled |= {id(one): own_log_probs(model, one) for later, _ in ahead for one in later}
            old: list[Tensor] = []
            for iteration in range(table.num_iterations):
                total, count = torch.zeros((), dtype=torch.float64), sum(sum(one.mask) for one in made)
                for place, (one, advantage) in enumerate(zip(made, advantages, strict=True)):
                    now = own_log_probs(model, one)
                    if not iteration:
                        old.append(now.detach())
                    ratio, r = (now - old[place]).exp(), wanted[id(one)] - now
                    part = -torch.minimum(ratio * advantage, ratio.clamp(*table.clip_range) * advantage)
                    if table.is_corrected:
                        part = part * (old[place] - sampled[id(one)]).exp().clamp(max=3.0)
                    total = total + (part + table.beta * (r.exp() - r - 1)).sum() / count
                total.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), job.max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
                rates.step()
                losses.append(total.item())
    return losses


def own_log_probs(model: transformers.PreTrainedModel, one: PlainCompletion) -> Tensor:
    """Of the tokens that the model wrote."""
    ids_T = torch.tensor(one.prompt_ids + one.ids)
    log_probs_TV = torch.log_softmax(model(ids_T[None]).logits[0, :-1], -1)
    found_T = log_probs_TV.gather(-1, ids_T[1:, None])[:, 0][-len(one.ids) :]
    return found_T[torch.tensor(one.mask) == 1]
