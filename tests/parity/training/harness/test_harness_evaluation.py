"""Tasks of lm-evaluation-harness within a run, beside its own model `hf` over `transformers` with the same weights."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.support.models.families import save_model
from tests.support.training import runs
from tests.support.training.local_links import local_links
from tests.support.training.runs import job_for, records, train
from tests.unit.server.kit import TOKENIZER
from tllm.core.errors import ConfigError
from tllm.training.harness import greedy_texts
from tllm.training.job import job_parts
from tllm.training.job.job import Job

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is an extra: pip install together-llm[eval]")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]

SEQ_LEN, MODEL_SEED = 48, 3
WORDS = "the dog is a small animal. how are you? hello world, fine thank you."
CHOOSES = """
task: chooses
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - metric: acc
  - metric: acc_norm
num_fewshot: 1
fewshot_split: test
"""
READS = """
task: reads
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}} {{question}} {{question}} {{question}}"
metric_list:
  - metric: word_perplexity
  - metric: bits_per_byte
"""
WRITES = """
task: writes
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{written}}"
generation_kwargs:
  until: ["{stop}"]
  max_gen_toks: 12
metric_list:
  - metric: exact_match
"""


@pytest.fixture(autouse=True)
def patient_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks wait while rank 0 has the harness list its tasks, which takes half a minute on a busy machine."""
    monkeypatch.setattr(runs, "local_links", partial(local_links, deadline=300.0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer, and tasks with their data in files. Half of what is to be written is what is."""
    folder = tmp_path_factory.mktemp("harness")
    save_model("llama", folder / "model", vocab_size=TOKENIZER.size, eos_token_id=TOKENIZER.eos_ids[0])
    TOKENIZER.inner.save(str(folder / "model" / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **TOKENIZER.config}
    (folder / "model" / "tokenizer_config.json").write_text(json.dumps(settings))
    texts = [greedy(folder / "model", question) for question in questions()]
    stop = texts[1][len(texts[1]) // 2]
    rows = [
        {"question": question, "choices": [" dog", " you?", " small animal"], "answer": number % 3, "written": written}
        for number, question in enumerate(questions())
        for written in [texts[number].partition(stop)[0] if number % 2 else "never said"]
    ]
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source: dict[str, Any] = {"dataset_path": "json", "test_split": "test"}
    source["dataset_kwargs"] = {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")}
    end = "".join(f"{key}: {json.dumps(value)}\n" for key, value in source.items())
    writes = WRITES.replace('"{stop}"', json.dumps(stop))
    (folder / "tasks").mkdir()
    for name, text in (("chooses", CHOOSES), ("reads", READS), ("writes", writes)):
        (folder / "tasks" / f"{name}.yaml").write_text(text + end)
    return folder


def questions() -> list[str]:
    words = WORDS.split()
    return [" ".join(words[start:] + words[:start]) for start in range(8)]


def greedy(model: Path, question: str) -> str:
    """Twelve tokens, by a loop."""
    whole = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = TOKENIZER.encode(question)[-(SEQ_LEN - 12) :]
    before = len(ids)
    with torch.inference_mode():
        while len(ids) < before + 12 and ids[-1] not in TOKENIZER.eos_ids:
            ids.append(int(whole(torch.tensor([ids])).logits[0, -1].argmax()))
    return TOKENIZER.decode(ids[before:], skip_special_tokens=True)


def evaluated_job(folder: Path, run: Path, *tasks: str, **more: Any) -> Job:
    keys: dict[str, Any] = dict(
        lm_eval_tasks=tasks,
        lm_eval_include_path=str(folder / "tasks"),
        eval_steps=1,
        max_steps=1,
        seq_len=SEQ_LEN,
        learning_rate=0.0,
        save_steps=1,
    )
    return job_for(folder / "model", run, **{**keys, **more})


@pytest.fixture(scope="module")
def truth(folder: Path) -> dict[str, float]:
    """What the harness says of the same weights over `transformers`."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    found = simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=tokenizer, max_length=SEQ_LEN, device="cpu", batch_size=4),
        tasks=["chooses", "reads", "writes"],
        task_manager=TaskManager(include_path=str(folder / "tasks")),
        bootstrap_iters=0,
        log_samples=False,
    )
    return {
        f"lm_eval/{task}/{metric}": values[f"{metric},none"]
        for task, values in found["results"].items()
        for metric in ("acc", "acc_norm", "word_perplexity", "bits_per_byte", "exact_match")
        if f"{metric},none" in values
    }


@pytest.mark.parametrize("plan", ["pp=1", "dp=2,pp=2,tp=2"])
def test_a_run_says_what_the_harness_does_over_transformers(
    plan: str, folder: Path, truth: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts of three prompts at a time, five tokens at a time."""
    monkeypatch.setattr(job_parts, "EVAL_PROMPTS_AT_ONCE", 3)
    monkeypatch.setattr(greedy_texts, "PIECE", 5)
    job = evaluated_job(folder, tmp_path / "run", "chooses", "reads", "writes", lm_eval_max_gen_toks=12)
    (record,) = records(train(job, plan))
    assert record.eval_metrics == pytest.approx(truth, rel=1e-5) and len(truth) == 5
    assert 0 < truth["lm_eval/writes/exact_match"] < 1 and 0 < truth["lm_eval/chooses/acc"] < 1
    assert record.eval_loss is None


def test_probabilities_alone_need_no_engine(folder: Path, truth: dict[str, float], tmp_path: Path) -> None:
    """So plans that cannot sample will do. Beside rows held out, and again at each evaluation, with other weights."""
    rows = (str(folder / "held_out.jsonl"),)
    Path(rows[0]).write_text('{"input_ids": [5, 6, 7, 8]}\n')
    keys: dict[str, Any] = dict(max_steps=2, save_steps=2, eval_files=rows, metric_for_best_model="lm_eval/chooses/acc")
    first, second = records(train(evaluated_job(folder, tmp_path / "a", "chooses", "reads", **keys), "cp=2,zero=3"))
    names = ("lm_eval/chooses/acc", "lm_eval/chooses/acc_norm", "lm_eval/reads/bits_per_byte")
    for record in (first, second):
        assert record.eval_metrics is not None and record.eval_loss is not None
        assert [record.eval_metrics[name] for name in names] == pytest.approx([truth[name] for name in names], rel=1e-5)


def test_a_task_says_which_model_is_the_best(folder: Path, truth: dict[str, float], tmp_path: Path) -> None:
    """Evaluations are of their step's weights, without rows held out. A metric that no task tells ends the run."""
    name = "lm_eval/reads/bits_per_byte"
    best: dict[str, Any] = dict(load_best_model_at_end=True, greater_is_better=False, early_stopping_patience=1)
    keys: dict[str, Any] = dict(max_steps=4, learning_rate=1e-1, metric_for_best_model=name, **best)
    events = train(evaluated_job(folder, tmp_path / "run", "reads", **keys), "dp=2")
    found = [(record.eval_metrics or {})[name] for record in records(events)]
    assert found[0] != pytest.approx(truth[name], rel=1e-3), "the weights of the step"
    assert len(found) < 4 and found[-1] >= min(found), "ended when nothing was gained"
    with pytest.raises(ConfigError, match="metric_for_best_model is 'lm_eval/reads/acc', which the tasks do not tell"):
        train(evaluated_job(folder, tmp_path / "no", "reads", metric_for_best_model="lm_eval/reads/acc"), "dp=2")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (dict(lm_eval_tasks=("nowhere_to_be_found",)), "the tasks nowhere_to_be_found cannot be loaded"),
        (dict(lm_eval_max_gen_toks=8), "the task writes generates up to 12 tokens and lm_eval_max_gen_toks is 8"),
        (dict(metric_for_best_model="lm_eval/gone/acc"), "metric_for_best_model is 'lm_eval/gone/acc', and that is no"),
        (dict(lm_eval_apply_chat_template=True), "the model has no chat template"),
    ],
)
def test_what_cannot_be_evaluated_is_told_before_the_first_step(
    keys: dict[str, Any], words: str, folder: Path, tmp_path: Path
) -> None:
    job = evaluated_job(folder, tmp_path / "run", "writes", **{"lm_eval_max_gen_toks": 12, **keys})
    with pytest.raises(ConfigError, match=words):
        train(job, "pp=1")
    assert not (tmp_path / "run" / "metrics.jsonl").exists() or not (tmp_path / "run" / "metrics.jsonl").read_text()
