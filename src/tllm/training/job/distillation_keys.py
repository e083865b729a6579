"""`DistillationKeys`: the table `[distill]` of a job: who teaches, and what is learned from the teacher."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tllm.core.errors import ConfigError
from tllm.training.job.key_limits import (
    ALONE,
    KeyLimits,
    WantedNodes,
    check_addresses,
    check_one_place,
    check_role_plan,
)
from tllm.training.job.rollout_keys import RolloutConfig

CODE_STEP = 1 / 12
"""Nats between two codes of a log-probability that travels in a byte."""

CODES_LOSE = CODE_STEP**2 / 8
"""Nats a token that these lose at most: `teachers/coded_log_probs.py` says why."""


@dataclass(frozen=True)
class DistillationKeys:
    """With `task = "distill"`: the student learns from the distribution that a teacher gives for each next token.

    The loss of a token is `alpha` times its cross-entropy plus 1 - `alpha` times the divergence, as in GKD
    (2306.13649). Names are those of TRL's `GKDConfig` where it has them.
    """

    LIMITS: ClassVar[KeyLimits] = KeyLimits(
        {
            "temperature": 0,
            "beta": 0,
            "alpha": 0,
            "top_k": 0,
            "kl_budget": 0,
            "lmbda": 0,
            "max_completion_length": 1,
            "max_num_seqs": 1,
            "max_staleness": 0,
            "hidden_state_loss_weight": 0,
            "teacher_hidden_size": 1,
        },
        {},
        {
            "teacher_dtype": ("float32", "bfloat16", "float64"),
            "log_prob_dtype": ("float32", "uint8"),
            "hidden_state_loss": ("mse", "cosine"),
            "hidden_state_dtype": ("float32", "bfloat16", "float64"),
        },
    )

    teacher_model_name_or_path: str | None = None
    """Folder of the teacher, or its name, to be computed in the process of rank 0, beside the student."""
    teachers: tuple[str, ...] = ()
    """Instead of that: addresses (`HOST:PORT`) where `tllm teach` serves the same teacher. They share the rows."""
    teacher_secret: str = "teacher.key"
    """With `teachers`: the file of the secret by which they and the run trust each other (`tllm teach --secret`)."""
    teacher_dtype: str = "float32"
    """What a teacher beside the student computes in: "float32", "bfloat16" or "float64"."""
    teacher_nodes: tuple[int | str, ...] = ()
    """Nodes of the run's own cluster that compute the teacher instead, and do not train: so many, or by their names; or
    "auto", as many as the planner finds best, none perhaps. Left out, the teacher is beside the student, and `tllm plan
    JOB.toml` says what would be best."""
    teacher_plan: str = ALONE
    """With `teacher_nodes`: how the nodes of one teacher divide it, by `pp` and `tp`: with "pp=2" two nodes are one
    teacher, and four are two. "auto": as the planner finds best. Left out, each node holds it whole."""
    top_k: int = 64
    """Tokens whose probabilities the teacher gives, the most likely ones; all others together are one bucket more. 0:
    every token."""
    kl_budget: float = 0.0
    """Send as few tokens of each place, at most `top_k`, as lose no more than this of the teacher's distribution p:
    KL(p || p') in nats, on average over the tokens of a row, where p' shares the mass of all others out evenly. 0:
    always `top_k`."""
    log_prob_dtype: str = "float32"
    """What log-probabilities travel in: "float32", or with `kl_budget` "uint8", a quarter of their bytes: steps of a
    twelfth of a nat, which lose at most 0.00087 nats a token. They are of the budget."""
    beta: float = 0.0
    """The divergence: 0 forward KL, 1 reverse KL, between them the generalised Jensen-Shannon divergence."""
    temperature: float = 1.0
    """Both distributions are of logits divided by it, and so are those that the student samples its completions from.
    The cross-entropy is not."""
    alpha: float = 0.0
    """Weight of the text's own cross-entropy; that of the divergence is 1 - `alpha`."""
    hidden_state_layers: tuple[tuple[int, int], ...] = ()
    """Pairs [student, teacher] of hidden states, of which the student's is to come near the teacher's beside the
    logits; numbered as `hidden_states` of `transformers`: 0 the embedding, n what layer n gives (counted from 1), of
    the last layer after the final norm; negative from the end, so that -1 is that. A projection without bias from the
    student's width to the teacher's is learned for each pair and saved, but is no part of the finished model."""
    teacher_hidden_size: int | None = None
    """With `hidden_state_layers`: the teacher's width, `hidden_size` of its `config.json`: every rank makes the
    projections before a teacher is asked."""
    hidden_state_loss: str = "mse"
    """"mse", the mean square over the teacher's width, or "cosine", 1 - cosine; the mean over tokens and pairs."""
    hidden_state_loss_weight: float = 1.0
    """What that is multiplied by; it is added to the loss that `alpha` mixes."""
    hidden_state_dtype: str = "float32"
    """What the teacher's hidden states travel in: "float32", "bfloat16", at half the bytes, or "float64"."""
    lmbda: float = 0.0
    """The share of steps whose completions the student samples itself, for the teacher to judge; the others learn from
    those of the data. 1: on-policy distillation (2306.13649). Which steps, is drawn from `seed`."""
    max_completion_length: int = 256
    """With `lmbda`: largest number of tokens in a completion of the student's, which is cut off there. A prompt may
    have as many as are left of `seq_len`."""
    mask_truncated_completions: bool = False
    """Learn nothing from a completion of the student's that was cut off at `max_completion_length`."""
    max_num_seqs: int = 32
    """Completions that one replica samples at once. Its KV cache has room for so many of `seq_len` tokens."""
    rollout_servers: tuple[str, ...] = ()
    """With `lmbda`: addresses (`HOST:PORT`) where `tllm rollout` samples the student's completions, each a share; left
    out, the ranks that train sample them."""
    rollout_secret: str = "rollout.key"
    """With `rollout_servers`: the file of the secret by which they and the run trust each other (`tllm rollout
    --secret`)."""
    rollout_nodes: tuple[int | str, ...] = ()
    """With `lmbda`, instead of `rollout_servers`: nodes of the run's own cluster that sample and do not train, so many,
    or by their names; or "auto", as many as the planner finds best, none perhaps."""
    rollout_plan: str = ALONE
    """With `rollout_nodes`: how the nodes of one engine divide the student, by `pp` and `tp`: with "pp=2" two nodes are
    one engine, and four are two. "auto": as the planner finds best. Left out, each node holds it whole."""
    max_staleness: int = 0
    """With `rollout_servers` or `rollout_nodes`: optimizer steps by which the student that writes may be older than the
    one that learns. These machines then write so many steps ahead while the student learns; 0: it waits for them."""

    @property
    def hidden_state_bytes(self) -> int:
        """Bytes of the teacher's hidden states of one token."""
        each = {"bfloat16": 2, "float32": 4, "float64": 8}[self.hidden_state_dtype]
        return len(self.teacher_hidden_states) * (self.teacher_hidden_size or 0) * each

    @property
    def teacher_hidden_states(self) -> tuple[int, ...]:
        """Those of the teacher that the student learns from, each once."""
        return tuple(dict.fromkeys(teacher for _, teacher in self.hidden_state_layers))

    @property
    def rollouts(self) -> RolloutConfig | None:
        """How the student's own completions are sampled, of which no function says what they are worth."""
        if not self.lmbda:
            return None
        return RolloutConfig(
            num_generations=1,
            max_completion_length=self.max_completion_length,
            temperature=self.temperature,
            mask_truncated_completions=self.mask_truncated_completions,
            max_num_seqs=self.max_num_seqs,
            rollout_servers=self.rollout_servers,
            rollout_secret=self.rollout_secret,
            rollout_nodes=self.rollout_nodes,
            rollout_plan=self.rollout_plan,
            max_staleness=self.max_staleness,
        )

    def __post_init__(self) -> None:
        self.LIMITS.check(self, "distill")
        if self.temperature == 0:
            raise ConfigError("distill.temperature is 0 and must be more", "1 leaves the distributions as they are")
        for key in ("beta", "alpha", "lmbda"):
            if getattr(self, key) > 1:
                raise ConfigError(f"distill.{key} is {getattr(self, key)} and must be 1 or less")
        if self.kl_budget and not 0 < self.top_k < 2**16:
            raise ConfigError(
                f"distill.kl_budget is {self.kl_budget} and distill.top_k is {self.top_k}: a budget chooses how many "
                "of the top_k tokens are sent",
                "give top_k the most of a place, 256 say and less than 65536, or leave kl_budget out",
            )
        if self.log_prob_dtype == "uint8" and self.kl_budget <= CODES_LOSE:
            raise ConfigError(
                f'distill.log_prob_dtype is "uint8" and distill.kl_budget is {self.kl_budget}: rounding to a byte may '
                f"lose {CODES_LOSE:.5f} nats a token, which a budget must have",
                "give kl_budget, 0.1 say, or leave log_prob_dtype out",
            )
        check_role_plan("distill", "teacher", self.teacher_plan, self.teacher_nodes)
        check_role_plan("distill", "rollout", self.rollout_plan, self.rollout_nodes)
        self._check_hidden_states()
        if self.alpha and self.lmbda:
            raise ConfigError(
                f"distill.alpha is {self.alpha} and distill.lmbda is {self.lmbda}: there is no text whose "
                "cross-entropy could be learned where the student writes the completions",
                "leave one of them out",
            )
        if bool(self.teacher_model_name_or_path) == bool(self.teachers):
            both = "both are given" if self.teachers else "neither is given"
            raise ConfigError(
                f"a student learns from distill.teacher_model_name_or_path or from distill.teachers, and {both}",
                "name a model to compute beside the student, or the addresses where `tllm teach` serves it",
            )
        for key, nodes in (("teachers", "teacher_nodes"), ("rollout_servers", "rollout_nodes")):
            check_addresses(getattr(self, key), f"distill.{key}")
            check_one_place(getattr(self, key), getattr(self, nodes), f"distill.{key}", f"distill.{nodes}")
        teaching, sampling = (WantedNodes.of(nodes, "").names for nodes in (self.teacher_nodes, self.rollout_nodes))
        if twice := sorted(set(teaching) & set(sampling)):
            raise ConfigError(
                f"distill.teacher_nodes and distill.rollout_nodes both name {twice[0]}", "give each node one role"
            )
        if (rollouts := self.rollouts) is not None:
            rollouts.check_staleness("distill")
        for key in ("rollout_servers", "rollout_nodes", "max_staleness"):
            if getattr(self, key) and not self.lmbda:
                raise ConfigError(
                    f"distill.{key} is given and distill.lmbda is 0: the student writes nothing",
                    "leave it out, or give lmbda, the share of steps in which it does",
                )

    def _check_hidden_states(self) -> None:
        layers = self.hidden_state_layers
        if not layers and self.teacher_hidden_size is not None:
            raise ConfigError(
                f"distill.teacher_hidden_size is {self.teacher_hidden_size} and distill.hidden_state_layers names no "
                "hidden states that would be projected to it",
                "name pairs of them, [[student, teacher], ...], or leave it out",
            )
        if not layers:
            return
        if self.teacher_hidden_size is None:
            raise ConfigError(
                "distill.hidden_state_layers is given and distill.teacher_hidden_size is not",
                "give the hidden_size of the teacher's config.json, to which the student's states are projected",
            )
        if not self.hidden_state_loss_weight:
            raise ConfigError(
                "distill.hidden_state_loss_weight is 0: the teacher's hidden states would travel for nothing",
                "give more, or leave hidden_state_layers out",
            )
        for at, pair in enumerate(layers):
            if pair in layers[:at]:
                raise ConfigError(f"distill.hidden_state_layers names {list(pair)} twice", "name each pair once")
