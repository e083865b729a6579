"""What the tests of saves share: models cut by any plan, their states cut by ZeRO, and the tensors they come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.support.comm.ranks import run_ranks
from tllm.comm.collectives.group import Group, local_groups
from tllm.model.transformer import Transformer, build
from tllm.parallel.mesh import mesh_of, whole
from tllm.parallel.shard import shard_of
from tllm.spec.families import spec_from_config
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan
from tllm.training.state.tensor_blocks import TensorBlock, blocks_of, model_blocks, optimizer_blocks

CONFIG: dict[str, Any] = dict(
    architectures=["Qwen3MoeForCausalLM"],
    model_type="qwen3_moe",
    vocab_size=13,
    hidden_size=6,
    intermediate_size=9,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    hidden_act="silu",
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    tie_word_embeddings=False,
    num_experts=3,
    num_experts_per_tok=2,
    moe_intermediate_size=5,
    decoder_sparse_step=2,
    mlp_only_layers=[],
    norm_topk_prob=True,
    torch_dtype="float32",
)
STATES = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Cut:
    """A plan, how many data-parallel replicas of it, and whether ZeRO cuts the states between them at these places."""

    plan: str
    dp: int = 1
    seams: tuple[float, ...] = ()


class Truth:
    """Every tensor of a model and of its optimizer's states, drawn at random."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32, **more: Any) -> None:
        self.config = {**CONFIG, **more}
        self.spec: ModelSpec = spec_from_config(self.config)
        self.dtype = dtype
        generator = torch.Generator().manual_seed(seed)
        shapes = {
            piece.name: tuple(stop for _, stop in piece.source) or tuple(parameter.shape)
            for parameter in build(self.spec, whole(self.spec), dtype, "meta").parameters()
            for piece in shard_of(parameter).pieces
        }
        self.tensors: dict[str, Tensor] = {}
        for name, shape in shapes.items():
            self.tensors[name] = torch.randn(shape, generator=generator).to(dtype)
            for state in STATES:
                self.tensors[f"{state}/{name}"] = torch.randn(shape, generator=generator)

    def holds(self, block: TensorBlock) -> bool:
        """Whether a block has just the truth's elements."""
        box = tuple(slice(*ends) for ends in block.box)
        return torch.equal(block.tensor, self.tensors[block.name][box])

    def fill(self, blocks: list[TensorBlock]) -> None:
        for block in blocks:
            block.tensor.copy_(self.tensors[block.name][tuple(slice(*ends) for ends in block.box)])


def world(truth: Truth, cut: Cut) -> int:
    return Plan.parse(cut.plan, truth.spec.num_layers).world_size * cut.dp


def held(truth: Truth, cut: Cut, rank: int) -> tuple[Transformer, list[TensorBlock]]:
    """The model of a rank, which ranks of one replica number first, and the blocks of it and of its states."""
    plan = Plan.parse(cut.plan, truth.spec.num_layers)
    replica, place = divmod(rank, plan.world_size)
    tp = local_groups(plan.stages[plan.place(place)[0]].tp)[plan.place(place)[1]]
    model = build(truth.spec, mesh_of(truth.spec, plan, place, tp), truth.dtype)
    blocks = model_blocks(model)
    for state in STATES:
        for parameter in model.parameters():
            shape, count = tuple(parameter.shape), parameter.numel()
            if not cut.seams:
                blocks += blocks_of(shard_of(parameter), torch.empty(shape), state)
                continue
            ends = sorted(int(seam * count) for seam in cut.seams)[: cut.dp - 1]
            bounds = [0, *ends, *[count] * (cut.dp - len(ends))]
            start, stop = bounds[replica], bounds[replica + 1]
            blocks += optimizer_blocks([(parameter, state, start, torch.empty(stop - start))])
    return model, blocks


def on_ranks(size: int, work: Any) -> list[Any]:
    """`work(group)` on as many ranks as there are, each with its group for saves."""

    def guarded(group: Group) -> Any:
        try:
            return work(group)
        except BaseException:
            group.close()  # so that the others do not wait for this one
            raise

    return run_ranks(local_groups(size, deadline=20.0, name="saves"), guarded)
