"""The job: values from file, command and defaults with their origins; mistakes named, and what to write instead."""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
from dataclasses import fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import msgspec
import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from tests.house.tree import SOURCE, sources
from tllm.core.errors import ConfigError
from tllm.training.job import job as job_module
from tllm.training.job.job import AT_LEAST, BELOW, CHOICES, Job
from tllm.training.job.job_file import ELSEWHERE, TYPES, ResolvedJob, read_job, write_job
from tllm.training.job.job_parts import data_config, learning_rate_schedule
from tllm.training.job.run_folder import RunStart, commit_here, commit_of, write_start
from tllm.training.optim.optimizer import SGD, AdamW, optimizer_of

JOB_MODULES = ("tllm.training.job.job", "tllm.training.step.rank_groups")
"""A job comes to who reads it by its own module, or in a `RankConfig`."""

BASE = dict(output_dir="run", train_files=("a.jsonl",), max_steps=10, config_name="config.json")
ISSUE = [
    "model_name_or_path",
    "train_files",
    "output_dir",
    "max_steps",
    "learning_rate",
    "lr_scheduler_type",
    "warmup_steps",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "max_grad_norm",
    "seed",
    "save_steps",
    "seq_len",
    "global_batch_size",
    "optimizer",
    "dtype",
    "shuffle",
    "plan",
    "deterministic",
]


def job_file(folder: Path, text: str) -> Path:
    path = folder / "job.toml"
    path.write_text(text)
    return path


def base_file(folder: Path, more: str = "") -> Path:
    return job_file(
        folder, 'output_dir = "run"\ntrain_files = ["a.jsonl"]\nmax_steps = 10\nconfig_name = "c.json"\n' + more
    )


def test_the_keys_people_know_are_there() -> None:
    assert set(ISSUE) <= set(TYPES)


def test_what_comes_later_wins_and_says_where_it_came_from(tmp_path: Path) -> None:
    path = base_file(tmp_path, "learning_rate = 1\nseed = 3\n")
    sets = ["seed=4", "learning_rate=3e-4", "train_files=b.jsonl, c.txt", "seed=5", "shuffle=false"]
    resolved = read_job(path, [*sets, "train_weights=1,2.5"], plan="pp=2,tp=2")
    job = resolved.job
    assert (job.learning_rate, job.seed, job.shuffle, job.plan) == (3e-4, 5, False, "pp=2,tp=2")
    assert job.train_files == ("b.jsonl", "c.txt")
    assert job.train_weights == (1.0, 2.5)
    assert job.max_steps == 10 and isinstance(job.learning_rate, float)
    origins = resolved.origins
    assert origins.keys() == TYPES.keys()
    assert (origins["max_steps"], origins["seed"], origins["plan"], origins["dtype"]) == (
        "job.toml",
        "--set",
        "--plan",
        "default",
    )


@pytest.mark.parametrize(
    ("sets", "values"),
    [
        (["output_dir=123", "model_name_or_path=none"], dict(output_dir="123")),
        (['output_dir="a b"'], dict(output_dir="a b")),
        (["train_files=['x,y.txt', \"z\"]"], dict(train_files=("x,y.txt", "z"))),
        (["train_files=one"], dict(train_files=("one",))),
        (["max_steps=1_000"], dict(max_steps=1000)),
        (["plan=pp=2,layers=1+3"], dict(plan="pp=2,layers=1+3")),
        (["report_to=tensorboard"], dict(report_to=("tensorboard",))),
        (["learning_rate=1"], dict(learning_rate=1.0)),
        (["output_dir=C:\\new"], dict(output_dir="C:\\new")),
    ],
)
def test_values_of_the_command_line(tmp_path: Path, sets: list[str], values: dict[str, Any]) -> None:
    file = base_file(tmp_path)
    file.write_text(file.read_text(), "utf-8-sig")  # as an editor of Windows saves it
    job = read_job(file, sets).job
    assert {name: getattr(job, name) for name in values} == values


def test_paths_of_a_program_are_texts() -> None:
    one, several = (
        {**BASE, "output_dir": Path("run"), "train_files": files} for files in (Path("a"), [Path("a"), "b"])
    )
    assert [read_job(keys).job.train_files for keys in (one, several)] == [("a",), ("a", "b")]
    assert read_job(one).job.output_dir == "run"


def test_one_text_where_a_list_is_meant(tmp_path: Path) -> None:
    assert read_job(base_file(tmp_path, 'report_to = "tensorboard"')).job.report_to == ("tensorboard",)


@pytest.mark.parametrize(
    ("line", "message", "hint"),
    [
        ("[lora]\nalpha = 16", "'lora.alpha' is no key", "did you mean 'lora_alpha'?"),
        ("[lora]\ndropout = 0.1", "'lora.dropout' is no key", "did you mean 'lora_dropout'?"),
        ("[grpo]\nmax_new_tokens = 9", "'grpo.max_new_tokens' is no key", "max_completion_length"),
        ("[grpo]\nkl_coef = 0.1", "'grpo.kl_coef' is no key", "give beta"),
        ("[grpo]\ndelta = 2.0", "'grpo.delta' is no key", "1 + epsilon_high alone"),
        ("[grpo]\nvllm_importance_sampling_mode = 'x'", "is no key", "begins with rollout_ here, not vllm_"),
        ("[rejection]\nbest_of = 4", "'rejection.best_of' is no key", "give num_generations"),
        ("[dpo]\nrpo_alpha = 1.0", "'dpo.rpo_alpha' is no key", "a job has one loss_type"),
        ("[simpo]\ngamma_beta_ratio = 0.5", "is no key", "simpo_gamma below [simpo] is beta times this"),
        ("[distill]\nstudent = 'm'", "'distill.student' is no key", "give model_name_or_path"),
        ("[lora]\nload_in_8bit = true", "is no key", 'quantize = "int8"'),
        ("[lora]\nlora_target = 'all'", "is no key", "target_modules"),
        ("learning_rte = 1.0", "job.toml: 'learning_rte' is no key", "did you mean 'learning_rate'?"),
        ("lr = 1.0", "'lr' is no key", "give learning_rate"),
        ("bf16 = true", "'bf16' is no key", "bfloat16"),
        ("per_device_train_batch_size = 8", "is no key", "microbatch_size"),
        ("[plan]\npp = 2", "plan = {'pp': 2}: expected str, got object", ""),
        ('seed = "x"', "job.toml: seed = 'x': expected int, got str", ""),
        ("seed = true", "seed = True: expected int, got bool", ""),
        ("shuffle = 1", "shuffle = 1: expected bool, got int", ""),
        ("seed = 1.5", "seed = 1.5: expected int, got float", ""),
        ("train_weights = ['x']", "expected float, got str", ""),
        ("seq_len = 0", "seq_len is 0 and must be 1 or more", ""),
        ("save_total_limit = 1", "save_total_limit is 1 and must be 2 or more", "one save is there if the other is"),
        ("num_train_epochs = 3", "is no key", "give max_steps: rows / global_batch_size"),
        ("warmup_steps = 0.1", "warmup_steps = 0.1: expected int, got float", "give a number of steps"),
        ("logging_steps = 10", "is no key", "metrics.jsonl has a line for each step"),
        ("gradient_checkpointing = true", "is no key", 'plan = "recompute=layer"'),
        ("dataloader_num_workers = 4", "is no key", "rank 0 reads"),
        ("num_generations = 8", "is no key", "write it below [grpo] or [rejection]"),
        ("lora_r = 16", "is no key", "write [lora], and r below it"),
        ("[lora]\nsave_steps = 5", "'lora.save_steps' is no key", "write it above [lora]"),
        ("[lora]\nbeta = 0.1", "'lora.beta' is no key", "write it below [dpo] or [kto]"),
        ("adam_beta1 = 1.0", "adam_beta1 is 1.0 and must be less than 1", ""),
        ("learning_rate = nan", "learning_rate is nan", "finite"),
        ("weight_decay = inf", "weight_decay is inf", "finite"),
        ('optimizer = "adam"', "optimizer is 'adam'", "did you mean 'adamw'?"),
        ('dtype = "bf16"', "dtype is 'bf16'", "bfloat16"),
        ("delay_steps = 2", "delay_steps is 2 and must be less than 2", ""),
        ('gradient_compression = "int4"', "gradient_compression is 'int4'", "int8"),
        ('model_name_or_path = "m"', "and both are given", "model_name_or_path to go on"),
        ("train_weights = [1.0, 2.0]", "2 train_weights and 1 train_files", "one weight for each"),
        ("seed = = 1", "job.toml is not TOML", '"quotes"'),
        ("packing = True", "job.toml is not TOML", "small letters"),
        ("seed = " + "9" * 5000, "job.toml is not TOML", "quotes"),
        ("seed = " + "[" * 5000, "job.toml is not TOML", "quotes"),
        ('seed = "1"', "seed = '1': expected int, got str", "without quotes"),
        ('packing = "yes"', "packing = 'yes': expected bool, got str", "write true or false, without quotes"),
        ('learning_rate = "1e-5"', "expected float, got str", "without quotes"),
        ("plan = {dp = 2}", "plan = {'dp': 2}", 'plan = "dp=2,pp=2"'),
        ('task = "DPO"', "task is 'DPO'", "did you mean 'dpo'?"),
        ('task = "ppo"', "task is 'ppo'", 'give "grpo"'),
        ("[Lora]\nr = 8", "'Lora' is no key", "write [lora]"),
        ("[training]\nseed = 1", "'training' is no key", "stand above them"),
        ("colour = 1", "'colour' is no key", "`python -m pydoc tllm.training.job.job`"),
        ("tensor_parallel_size = 2", "is no key", "plan says who computes what"),
        ('base_model = "x"', "is no key", "give model_name_or_path"),
        ("seed = 1\nseed = 2", "job.toml is not TOML", "a key is there twice"),
        ("output = 'a'", "'output' is no key", "output_dir"),
    ],
)
def test_mistakes(tmp_path: Path, line: str, message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_job(base_file(tmp_path, line))
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_no_key_of_transformers_is_taken_for_a_mistyped_one(tmp_path: Path) -> None:
    """'did you mean local_steps?' for logging_steps would be a run that learns something else."""
    habits = {field.name for field in fields(transformers.TrainingArguments)} - set(TYPES)
    assert len(habits) > 80
    for key in habits:
        with pytest.raises(ConfigError) as caught:
            read_job(base_file(tmp_path, f"{key} = 1"))
        assert "did you mean" not in caught.value.hint, key


def test_mistakes_of_the_whole(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the job .*none\.toml: No such file"):
        read_job(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="does not give output_dir, train_files"):
        read_job(job_file(tmp_path, "max_steps = 3"))
    with pytest.raises(ConfigError, match="neither is given"):
        read_job(None, ["output_dir=o", "train_files=a", "max_steps=1"])
    with pytest.raises(ConfigError, match="tokenizer_name"):
        read_job(None, ["output_dir=o", "train_files=a", "max_steps=1", "model_name_or_path=m", "tokenizer_name=t"])
    with pytest.raises(ConfigError, match="train_files is empty"):
        read_job(base_file(tmp_path), ["train_files="])
    for wrong in ("seed", "=3", "seed=", "sed=3", "seed=x"):
        with pytest.raises(ConfigError, match="--set"):
            read_job(base_file(tmp_path), [wrong])


names = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1)


@given(
    st.fixed_dictionaries(
        {},
        optional=dict(
            output_dir=names,
            train_files=st.lists(names, min_size=1, max_size=3).map(tuple),
            seed=st.integers(0, 2**62),
            learning_rate=st.floats(0, 1e300),
            adam_epsilon=st.floats(0, 1),
            shuffle=st.booleans(),
            report_to=st.just(("tensorboard",)),
            tokenizer_name=st.one_of(st.none(), names),
            max_steps=st.integers(1, 10**9),
        ),
    ),
    st.sampled_from(["--set", "default", "job.toml"]),
)
def test_what_is_written_is_read_again(values: dict[str, Any], origin: str) -> None:
    job = Job(**{**BASE, **values})
    text = write_job(ResolvedJob(job, dict.fromkeys(TYPES, origin)))
    path = _memory_file(text)
    assert read_job(path).job == job
    assert text.count(f"  # {origin}\n") == sum("." not in key for key in TYPES), "no table is given"


def _memory_file(text: str) -> Path:
    class Text(type(Path())):  # type: ignore[misc]
        def read_text(self, *args: object) -> str:
            return text

    return Text("job.toml")


def test_every_key_is_read_by_somebody() -> None:
    """A wish that nothing reads would be passed over in silence. The trees of the house tests are not for here: they
    stay, and each full collection of circular references would look at them for as long as this process lives."""
    texts = [path.read_text() for path in sources()]
    read = {
        node.attr
        for text in texts
        if any(f"from {module}" in text for module in JOB_MODULES)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and _last_name(node.value) in ("job", "_job")
    }
    keys = {field.name for field in fields(Job)} - {"rejection"}  # it is read as `job.rollouts`
    assert "rollouts" in read
    assert not keys - read, f"nothing reads {sorted(keys - read)}"
    for table in (AT_LEAST, BELOW, CHOICES):
        assert set(table) <= keys
    assert not [key for key in TYPES if any(fnmatchcase(key, pattern) for pattern in ELSEWHERE)]


def test_the_parts_take_the_jobs_values() -> None:
    job = Job(
        **BASE,  # type: ignore[arg-type]
        seq_len=7,
        global_batch_size=3,
        seed=9,
        shuffle=False,
        packing=False,
        over_long="refuse",
        documents="stream",
        add_eos=False,
        train_weights=(2.0,),
        lr_scheduler_type="warmup_stable_decay",
        warmup_steps=2,
        num_decay_steps=3,
        num_cycles=0.25,
        min_lr_ratio=0.1,
        adam_beta1=0.8,
        adam_beta2=0.95,
        adam_epsilon=1e-6,
    )
    config = data_config(job)
    assert (config.files, config.seq_len, config.global_batch_size, config.weights) == (("a.jsonl",), 7, 3, (2.0,))
    assert (config.seed, config.shuffle, config.packing, config.over_long) == (9, False, False, "refuse")
    assert (config.documents, config.add_eos, config.epochs) == ("stream", False, None)
    rates = learning_rate_schedule(job)
    assert (rates.kind, rates.max_steps, rates.warmup_steps) == ("warmup_stable_decay", 10, 2)
    assert (rates.decay_steps, rates.cycles, rates.floor) == (3, 0.25, 0.1)
    assert optimizer_of(job) == AdamW(0.8, 0.95, 1e-6)
    assert optimizer_of(Job(**BASE, optimizer="sgd", momentum=0.5)) == SGD(0.5)  # type: ignore[arg-type]


def test_what_reads_a_job_is_made_before_the_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads that make it at once, each for the run that it serves, end their process in msgspec's C code."""
    found = importlib.util.spec_from_file_location("job_again", job_module.__file__)
    assert found is not None and found.loader is not None
    again = importlib.util.module_from_spec(found)
    monkeypatch.setitem(sys.modules, "job_again", again)
    found.loader.exec_module(again)
    assert "__msgspec_cache__" in vars(again.Job), "what msgspec knows of a class that it has a decoder of"


def test_the_run_folder_says_what_ran(tmp_path: Path) -> None:
    resolved = read_job(base_file(tmp_path), ["seed=8"], plan="pp=2")
    for step, plan in ((0, "pp=2"), (40, "tp=2")):
        start = RunStart(time="2026-11-21T07:00:00Z", step=step, plan=plan, world_size=2, commit=None)
        write_start(tmp_path / "run", resolved, start)
    again = read_job(tmp_path / "run" / "job.toml")
    assert again.job == resolved.job
    assert "seed = 8  # --set" in (tmp_path / "run" / "job.toml").read_text()
    lines = [json.loads(line) for line in (tmp_path / "run" / "starts.jsonl").read_text().splitlines()]
    assert [(line["step"], line["plan"], line["world_size"]) for line in lines] == [(0, "pp=2", 2), (40, "tp=2", 2)]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["job.toml", "starts.jsonl"]
    assert msgspec.json.decode(json.dumps(lines[0]), type=RunStart).version
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write"):
        write_start(tmp_path / "file", resolved, start)


def test_the_commit_is_the_repositorys(tmp_path: Path) -> None:
    assert commit_of(tmp_path) is None
    root = SOURCE.parents[1]
    said = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=False)
    if said.returncode == 0:
        assert commit_of(root) == commit_here() == said.stdout.strip()
    git = tmp_path / ".git"
    git.mkdir()
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    assert commit_of(tmp_path) is None, "before the first commit"
    (git / "packed-refs").write_text(f"# pack-refs with: peeled\n{'a' * 40} refs/heads/main\n^{'b' * 40}\n")
    assert commit_of(tmp_path) == "a" * 40
    (git / "refs" / "heads").mkdir(parents=True)
    (git / "refs" / "heads" / "main").write_text("c" * 40 + "\n")
    assert commit_of(tmp_path) == "c" * 40
    (git / "HEAD").write_text("d" * 40 + "\n")
    assert commit_of(tmp_path) == "d" * 40


def _last_name(node: ast.expr) -> str:
    """`job` of `job` and of `config.job`."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
