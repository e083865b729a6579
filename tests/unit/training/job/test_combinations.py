"""What cannot be combined is refused at the start, in words that name both sides."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from tests.support.models.families import SHAPE
from tllm.core.errors import ConfigError, PlanError
from tllm.spec.families import spec_from_config
from tllm.spec.plan import Plan
from tllm.spec.trainable import check_lock_step
from tllm.training.job.combinations import check_combination, warn_of_context, warn_of_idle
from tllm.training.job.distillation_keys import DistillationKeys
from tllm.training.job.job import Job
from tllm.training.job.lora_job import LoraJob
from tllm.training.job.rollout_keys import GRPOConfig

LLAMA = dict(
    SHAPE, model_type="llama", architectures=["LlamaForCausalLM"], rms_norm_eps=1e-6, tie_word_embeddings=False
)
TIED = dict(LLAMA, tie_word_embeddings=True)
MIXTRAL = dict(
    LLAMA, model_type="mixtral", architectures=["MixtralForCausalLM"], num_local_experts=5, num_experts_per_tok=2
)
GLM = dict(
    LLAMA,
    model_type="glm4_moe",
    n_routed_experts=6,
    num_experts_per_tok=3,
    moe_intermediate_size=20,
    n_shared_experts=2,
)
DELTA = dict(LLAMA, model_type="qwen3_5_text", head_dim=16, num_key_value_heads=2)


def check(plan: str, config: dict[str, Any], **more: Any) -> None:
    spec = spec_from_config(config)
    job = Job(
        **{
            **dict(output_dir="run", train_files=("a.jsonl",), max_steps=1, config_name="c", global_batch_size=8),
            **more,
        }
    )
    check_combination(job, Plan.parse(plan, spec.num_layers), spec)


@pytest.mark.parametrize(
    ("plan", "config", "more", "says"),
    [
        ("dp=2,ep=2", LLAMA, {}, "ep=2 and the model has no experts"),
        ("dp=3,ep=2", MIXTRAL, {}, "ep=2 does not divide the 3 replicas"),
        ("dp=3:1,ep=2", MIXTRAL, {}, "have 6, 2 microbatches"),
        ("dp=8,ep=8", MIXTRAL, {}, "cannot be spread over ep=8"),
        ("pp=2,tp=1+2,sequence=true", LLAMA, {}, "tp=1\\+2"),
        ("dp=3,zero=3", LLAMA, {}, "2, 3, 3 microbatches"),
        ("pp=1,chunks=2", TIED, {}, "table of a tied model in 2"),
        ("pp=2,chunks=2,schedule=1f1b", LLAMA, {}, "1f1b with 2 chunks"),
        ("pp=3,depth=1+2+3", LLAMA, {}, "3 warm-up depths"),
        ("pp=2,schedule=gpipe,depth=2", LLAMA, {}, "gpipe has no warm-up"),
        ("tp=9", LLAMA, {}, "query heads of 8"),
        ("dp=2,pp=2,servers=1", LLAMA, {}, "replicas of 2 ranks"),
        ("dp=2,servers=1,zero=1", LLAMA, {}, "zero=1"),
        ("tp=3,servers=1", LLAMA, {}, "replicas of 3 ranks"),
        ("cp=2", DELTA, {}, "cp=2 and a qwen3_5_text model: its gated delta nets have a state"),
        ("cp=2,servers=1", LLAMA, {}, "replicas of 2 ranks"),
        ("dp=2,ep=2,servers=1", MIXTRAL, {}, "ep=2"),
        ("dp=2,offload=host,servers=1", LLAMA, {}, "offload=host"),
        ("dp=1:20,servers=1", LLAMA, {"max_staleness": 1}, "replica 0 has none of the 8 microbatches"),
        ("dp=2,servers=1", LLAMA, {"local_steps": 4}, "local_steps and servers"),
        ("dp=2", LLAMA, {"local_steps": 4, "delay_steps": 1}, "local_steps and delay_steps"),
        ("dp=2,zero=1", LLAMA, {"local_steps": 4}, "leave out zero"),
        ("dp=2,ep=2", MIXTRAL, {"delay_steps": 1}, "leave out ep"),
        ("dp=2,cp=2", LLAMA, {"local_steps": 4}, "local_steps=4 and cp=2"),
        ("dp=2", LLAMA, {"max_staleness": 3}, "no servers"),
        ("dp=2", LLAMA, {"router_aux_loss_coef": 0.01}, "has no experts"),
        ("dp=2", GLM, {"router_aux_loss_coef": 0.01}, "no probabilities"),
        ("dp=2", GLM, {"dtype": "bfloat16"}, "correction bias of a glm4_moe router needs float32"),
        ("dp=2", LLAMA, {"gradient_compression": "int8", "deterministic": True}, "deterministic=true"),
        ("pp=1", LLAMA, {"local_steps": 2, "deterministic": True}, "local_steps=2: what is learned hangs"),
        ("dp=2", LLAMA, {"delay_steps": 1, "deterministic": True}, "delay_steps=1: what is learned hangs"),
        ("tp=2", LLAMA, {"deterministic": True}, "tp=2"),
        ("dp=3", LLAMA, {"deterministic": True}, "does not divide 8"),
        ("pp=2", TIED, {"deterministic": True}, "tied embeddings"),
        ("pp=2,tp=4,tensor=2d", LLAMA, {}, "2 runs of layers: in training a grid has all layers"),
        ("tp=4,tensor=2d", MIXTRAL, {}, "tensor=2d and a mixtral model with experts"),
        ("tp=8,tensor=3d", DELTA, {}, "tensor=3d and a qwen3_5_text model with gated delta nets"),
        ("tp=64,tensor=2.5d", dict(LLAMA, hidden_size=32, num_attention_heads=2, head_dim=16), {}, "query heads of 2"),
        ("tp=4,tensor=2d", dict(LLAMA, vocab_size=1), {}, "vocabulary of 1"),
        ("tp=4,tensor=2d", LLAMA, {"neftune_noise_alpha": 5.0}, "tensor=2d and neftune_noise_alpha = 5"),
        ("tp=4,tensor=2d", LLAMA, {"deterministic": True}, "tp=4"),
        (
            "tp=4,tensor=2d",
            LLAMA,
            {"lora": LoraJob(), "model_name_or_path": "m", "config_name": None},
            r"tensor=2d and \[lora\]",
        ),
        (
            "tp=4,tensor=2d",
            LLAMA,
            {"task": "distill", "distill": DistillationKeys("t")},
            "tensor=2d and task = 'distill'",
        ),
        ("dp=2", LLAMA, {"task": "distill", "distill": DistillationKeys("t", top_k=101)}, "the model has 101 tokens"),
    ],
)
def test_it_is_refused(plan: str, config: dict[str, Any], more: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says) as caught:
        check(plan, config, **more)
    assert caught.value.hint


STATES = DistillationKeys("t", hidden_state_layers=((0, 0), (-1, -1)), teacher_hidden_size=64)


@pytest.mark.parametrize(
    ("plan", "distill", "more", "says"),
    [
        ("pp=2", {"hidden_state_layers": ((5, 1),)}, {}, "the student's hidden state 5 and it has 4 layers"),
        ("pp=2", {"hidden_state_layers": ((-6, 1),)}, {}, "the student's hidden state -6 and it has 4 layers"),
        ("pp=2", {"hidden_state_layers": ((4, 1), (-1, 1))}, {}, r"names \[-1, 1\] twice"),
        ("dp=2,servers=1", {}, {}, "servers=1, which keep the model's weights, and distill.hidden_state_layers"),
        (
            "dp=2",
            {"teacher_hidden_size": 8192},
            {"seq_len": 8192},
            "of 4 rows of 8192 tokens take 2.00 GiB at 64.0 KiB a token, and .* 1.00 GiB",
        ),
    ],
)
def test_hidden_states_that_cannot_be_learned_are_refused(
    plan: str, distill: dict[str, Any], more: dict[str, Any], says: str
) -> None:
    with pytest.raises((ConfigError, PlanError), match=says) as caught:
        check(plan, LLAMA, task="distill", distill=replace(STATES, **distill), **more)
    assert caught.value.hint
    check("dp=2,pp=2,tp=2,cp=1,zero=2,sequence=true", LLAMA, task="distill", distill=STATES)


@pytest.mark.parametrize("teacher_plan", ["tp=2", "pp=2,tp=1+2", "auto"])
def test_a_role_of_a_deterministic_run_divides_its_model_by_stages_alone(teacher_plan: str) -> None:
    keys = DistillationKeys("t", teacher_nodes=(6,), teacher_plan=teacher_plan)
    check("dp=2", LLAMA, task="distill", distill=keys)
    says = re.escape(f"distill.teacher_plan is {teacher_plan!r} and deterministic=true")
    with pytest.raises(ConfigError, match=says):
        check("dp=2", LLAMA, task="distill", distill=keys, deterministic=True)
    by_stages = replace(keys, teacher_plan="pp=2")
    check("dp=2", LLAMA, task="distill", distill=by_stages, deterministic=True)


ON_POLICY = {"task": "distill", "distill": DistillationKeys("t", lmbda=0.5, max_completion_length=32), "seq_len": 64}


@pytest.mark.parametrize(
    ("plan", "more", "says"),
    [
        ("cp=2", {}, "task=distill and cp in the plan"),
        ("dp=2,zero=3", {}, "task=distill and zero=3"),
        ("dp=2,servers=1", {}, "task=distill and servers"),
        ("pp=2,chunks=2", {}, "task=distill and chunks"),
        ("dp=2", {"local_steps": 2}, "task=distill and local_steps=2"),
        ("dp=2", {"seq_len": 32}, "distill.max_completion_length is 32 and seq_len is 32"),
        ("dp=2", {"neftune_noise_alpha": 5.0}, "which are sampled without noise"),
        (
            "dp=2",
            {"lora": LoraJob(lora_dropout=0.1), "config_name": None, "model_name_or_path": "m"},
            "lora.lora_dropout is 0.1 and the task 'distill' .* without dropout",
        ),
    ],
)
def test_completions_of_the_student_are_refused_where_grpo_s_are(plan: str, more: dict[str, Any], says: str) -> None:
    with pytest.raises((ConfigError, PlanError), match=says):
        check(plan, LLAMA, **{**ON_POLICY, **more})
    check("dp=2,pp=2", LLAMA, **ON_POLICY)
    check("cp=2", LLAMA, task="distill", distill=DistillationKeys("t"))


def test_rows_beyond_the_context_of_the_model_are_told(caplog: pytest.LogCaptureFixture) -> None:
    spec = spec_from_config({**SHAPE, **LLAMA, "max_position_embeddings": 64})
    job = Job("run", ("a.txt",), 2, config_name="c", seq_len=64)
    warn_of_context(job, spec)
    assert not caplog.messages
    warn_of_context(replace(job, seq_len=65), spec)
    assert "seq_len is 65 and the model's context 64 tokens" in caplog.text


def test_replicas_that_get_nothing_of_a_step_are_told(caplog: pytest.LogCaptureFixture) -> None:
    job = Job("run", ("a.txt",), 2, config_name="c", global_batch_size=4, microbatch_size=2)
    warn_of_idle(job, Plan.parse("dp=2", 2))
    assert not caplog.messages
    warn_of_idle(job, Plan.parse("dp=5", 2))
    assert "a step has 2 microbatches for 5 replicas, and 3 without any: give a smaller" in caplog.text
    warn_of_idle(replace(job, microbatch_size=4), Plan.parse("dp=2", 2))
    assert "a step has 1 microbatch for 2 replicas" in caplog.text


def test_rates_that_cannot_be_are_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="5 warm-up and 0 decay steps are more than all 1"):
        check("pp=1", LLAMA, warmup_steps=5)


@pytest.mark.parametrize(
    ("more", "reads"),
    [
        ({"momentum": 0.5}, {"optimizer": "sgd"}),
        ({"adam_beta2": 0.95, "optimizer": "sgd"}, {"optimizer": "adamw"}),
        ({"powersgd_rank": 8}, {"gradient_compression": "powersgd"}),
        ({"outer_momentum": 0.5}, {"local_steps": 2}),
        ({"documents": "stream"}, {"train_files": ("a.txt.gz",)}),
        ({"eval_steps": 10}, {"eval_files": ("b.jsonl",)}),
        ({"eval_max_new_tokens": 64, "seq_len": 128}, {"eval_files": ("b.jsonl",), "eval_num_prompts": 1}),
        ({"early_stopping_threshold": 0.1}, {"eval_files": ("b.jsonl",), "early_stopping_patience": 1}),
        ({"greater_is_better": True}, {"eval_files": ("b.jsonl",), "early_stopping_patience": 1}),
    ],
)
def test_a_value_that_nothing_would_read_is_refused(more: dict[str, Any], reads: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(more))} is .* and would not be read") as caught:
        check("pp=1", LLAMA, **more)
    assert list(reads)[-1] in caught.value.hint
    check("pp=1", LLAMA, **{**more, **reads})


ADDRESSES = ("10.0.0.7:7070",)
REWARDED = dict(reward_funcs=("rewards.py:right",), num_generations=4, max_completion_length=32)
UNREAD: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {
    "distill": [
        ({"max_num_seqs": 8}, {"max_completion_length": 16, "lmbda": 0.5}),
        ({"mask_truncated_completions": True}, {"max_completion_length": 16, "lmbda": 0.5}),
        ({"max_completion_length": 16}, {"lmbda": 0.5}),
        ({"rollout_secret": "s", "max_completion_length": 16, "lmbda": 0.5}, {"rollout_servers": ADDRESSES}),
        ({"teacher_secret": "s"}, {"teacher_model_name_or_path": None, "teachers": ADDRESSES}),
        ({"hidden_state_loss": "cosine"}, {"teacher_hidden_size": 9, "hidden_state_layers": ((1, 2),)}),
        ({"hidden_state_dtype": "bfloat16"}, {"teacher_hidden_size": 9, "hidden_state_layers": ((1, 2),)}),
    ],
    "grpo": [
        ({"rollout_secret": "s"}, {"rollout_servers": ADDRESSES}),
        ({"reward_dtype": "float64"}, {"reward_model_name_or_path": "scorer"}),
        ({"max_tool_calling_iterations": 3}, {"tools": ("tools.py:add",)}),
        ({"kl_estimator": "k1"}, {"beta": 0.1}),
        ({"rollout_importance_sampling_clip_max": 2.0}, {"rollout_importance_sampling_correction": True}),
    ],
}
"""By task keys of its table that nothing reads, each with others by which it is read, the one that is named last."""


@pytest.mark.parametrize(("task", "more", "reads"), [(task, *one) for task, some in UNREAD.items() for one in some])
def test_keys_of_tables_that_nothing_would_read_are_refused(
    task: str, more: dict[str, Any], reads: dict[str, Any]
) -> None:
    def job(keys: dict[str, Any]) -> None:
        given: dict[str, Any] = {**(REWARDED if task == "grpo" else {"teacher_model_name_or_path": "t"}), **keys}
        table = DistillationKeys(**given) if task == "distill" else GRPOConfig(**given)
        check("pp=1", LLAMA, task=task, seq_len=64, **{task: table})

    with pytest.raises(ConfigError, match=f"{task}.{next(iter(more))} is .* and would not be read") as caught:
        job(more)
    assert list(reads)[-1] in caught.value.hint
    job({**more, **reads})


def test_the_dtype_of_teachers_elsewhere_is_their_own() -> None:
    keys = DistillationKeys(teachers=ADDRESSES, teacher_dtype="bfloat16")
    with pytest.raises(ConfigError, match=r"distill\.teacher_dtype is bfloat16 and would not be read"):
        check("pp=1", LLAMA, task="distill", distill=keys)


def test_completions_that_no_evaluation_samples_are_refused() -> None:
    grpo = GRPOConfig(**REWARDED, num_generations_eval=2)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"grpo\.num_generations_eval is 2 and would not be read"):
        check("pp=1", LLAMA, task="grpo", grpo=grpo, seq_len=64)
    check("pp=1", LLAMA, task="grpo", grpo=grpo, seq_len=64, eval_files=("b.jsonl",))
    with pytest.raises(ConfigError, match="add_eos is False and would not be read"):
        check("pp=1", LLAMA, task="grpo", grpo=replace(grpo, num_generations_eval=None), seq_len=64, add_eos=False)


@pytest.mark.parametrize(
    ("plan", "config", "more"),
    [
        ("dp=2,pp=2,cp=2,tp=2,zero=3,sequence=true,recompute=layer", LLAMA, {}),
        ("dp=4,ep=2,pp=2,tp=2,experts=spread,zero=2", MIXTRAL, {"router_aux_loss_coef": 0.01}),
        ("dp=2,ep=2,pp=2,zero=1", GLM, {}),
        ("pp=2", GLM, {"dtype": "bfloat16", "lora": LoraJob(), "model_name_or_path": "m", "config_name": None}),
        ("dp=3:1,pp=2,schedule=zero_bubble,depth=2", TIED, {}),
        ("pp=2,chunks=2", TIED, {}),
        ("dp=2,servers=2", LLAMA, {"max_staleness": -1}),
        ("dp=1:20,servers=2", LLAMA, {}),
        ("dp=2,pp=2", LLAMA, {"local_steps": 4, "gradient_compression": "int8"}),
        ("dp=8,zero=2", LLAMA, {"deterministic": True}),
        ("dp=2,zero=3", LLAMA, {"delay_steps": 1}),
        ("dp=9", LLAMA, {}),
        ("dp=2,tp=4,tensor=2d,zero=2,recompute=layer,offload=host", TIED, {"local_steps": 1}),
        ("tp=8,tensor=3d", LLAMA, {"gradient_compression": "bf16"}),
    ],
)
def test_it_goes_together(plan: str, config: dict[str, Any], more: dict[str, Any]) -> None:
    check(plan, config, **more)


def test_replicas_that_wait_for_each_other_have_as_many_microbatches() -> None:
    check_lock_step([3, 3, 2, 2], 2)
    check_lock_step([3, 0, 7], 1)
    with pytest.raises(PlanError, match=r"replicas 2 to 3 .*ep=2.* have 2, 1 microbatches") as refused:
        check_lock_step([3, 3, 2, 1], 2)
    assert "equal shares" in refused.value.hint
    with pytest.raises(PlanError, match="ep=2 does not divide the 3 replicas"):
        check_lock_step([1, 1, 1], 2)


SCORING = dict(LLAMA, architectures=["LlamaForSequenceClassification"], id2label={"0": "LABEL_0"})
THREE = dict(SCORING, id2label={"0": "a", "1": "b", "2": "c"})


@pytest.mark.parametrize(
    ("plan", "config", "more", "says"),
    [
        ("pp=1", SCORING, {"task": "dpo"}, "classification head of 1 label, and the task 'dpo'"),
        ("pp=1", SCORING, {}, "classification head of 1 label, and the task 'sft'"),
        ("pp=1", dict(LLAMA, architectures=["LlamaModel"]), {}, "saved without its head for tokens"),
        ("pp=1", dict(LLAMA, is_causal=False), {}, "it is not causal"),
        ("pp=1", dict(SCORING, is_causal=False), {"task": "reward"}, "it is not causal"),
        ("pp=1", THREE, {"task": "reward"}, "this model's head has 3 labels"),
        ("pp=1", LLAMA, {"task": "reward"}, "this model's head has 0 labels"),
        ("dp=2,servers=1", LLAMA, {"task": "dpo"}, "servers and the task 'dpo'"),
        ("dp=2", LLAMA, {"task": "kto", "local_steps": 4}, "local_steps and the task 'kto'"),
        ("dp=2,servers=1", LLAMA, {"eval_files": ("b.jsonl",)}, "servers and eval_files"),
        ("dp=2", LLAMA, {"eval_files": ("b.jsonl",), "local_steps": 4}, "local_steps and eval_files"),
    ],
)
def test_what_a_task_cannot_be_combined_with(
    plan: str, config: dict[str, Any], more: dict[str, Any], says: str
) -> None:
    with pytest.raises((ConfigError, PlanError), match=says):
        check(plan, config, **more)


def test_a_reward_model_is_trained_under_plans() -> None:
    check("dp=2,pp=2,tp=2", SCORING, task="reward")
