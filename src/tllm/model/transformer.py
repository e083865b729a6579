"""The one model definition: `Transformer`, layers [start, stop) of any family, cut or whole, served or trained."""

from __future__ import annotations

from contextlib import nullcontext
from typing import cast

import torch
from torch import Tensor, nn

from tllm.model.attention import Attend, AttentionSpec
from tllm.model.gated_delta_net import GatedDeltaNet
from tllm.model.layer import Layer, norm_of
from tllm.model.recurrence import StateShape
from tllm.model.rope import Rotation, rotation
from tllm.parallel.embedding import VocabEmbedding, VocabLogits, vocab_parameter
from tllm.parallel.linear import Adapt, ColumnLinear, LinearRows, unadapted
from tllm.parallel.mesh import Mesh
from tllm.parallel.shard import held_dtype
from tllm.spec.model_spec import ModelSpec, RopeSpec


class Transformer(nn.Module):
    """The layers of one stage. The first stage also embeds token ids, the last also makes logits, or with a
    classification head in place of that for tokens (`spec.num_labels`) scores.

    forward: ids_T (first stage) or x_TD, and positions_T -> x_TD after this stage's layers.
    `adapt` adds what adapters of some of the rows add to each linear, and to the embeddings.
    logits: x_TD (rows of the last stage's result) -> logits_TV for this rank's part of the vocabulary, `vocab`.
    With sequence parallelism x_TD of forward and logits is this rank's slice of the tokens, and `tokens` tells how
    many there are; positions and logits are of all tokens.
    """

    def __init__(self, spec: ModelSpec, mesh: Mesh) -> None:
        super().__init__()
        self.spec = spec
        self.vocab = mesh.cut.vocab
        self.seam = mesh.seam
        self.is_first = mesh.layers.start == 0
        self.is_last = mesh.layers.stop == spec.num_layers
        width, name = spec.hidden_size, "model.embed_tokens.weight"
        spread = spec.tied and mesh.pp > 1
        # Parameters are made in the order in which a forward pass needs them: training counts on it.
        if self.is_first:
            table = vocab_parameter(name, self.vocab, width, replicated=spread)
            self.embed_tokens = VocabEmbedding(table, self.vocab, mesh.seam, spec.embedding_scale)
        self.layers = nn.ModuleDict({str(i): Layer(spec, mesh, i) for i in mesh.layers})
        if self.is_last:
            self.norm = norm_of(spec, mesh, "model.norm")
            if spec.num_labels:
                self.score = ColumnLinear(width, [LinearRows("score", 0, spec.num_labels)], replicated=True)
                return
            if spec.tied and self.is_first:
                head = self.embed_tokens.weight
            else:
                head = vocab_parameter(name if spec.tied else "lm_head.weight", self.vocab, width, replicated=spread)
            self.lm_head = VocabLogits(head, self.vocab, spec.final_softcap, spec.logits_scaling)

    def forward(
        self,
        x: Tensor,
        positions_T: Tensor,
        attend: Attend,
        lengths_T: Tensor | None = None,
        adapt: Adapt = unadapted,
    ) -> Tensor:
        x_TD = self.embed_tokens(x, adapt) if self.is_first else x
        tokens = len(positions_T)
        rotations: dict[RopeSpec, Rotation] = {}
        for layer in self._own_layers().values():
            rope = layer.rope
            if rope is not None and rope not in rotations:
                rotations[rope] = rotation(rope, positions_T, x_TD.dtype, lengths_T)
            x_TD = layer(x_TD, None if rope is None else rotations[rope], attend, tokens, adapt)
        return x_TD

    def logits(self, x_TD: Tensor, tokens: int | None = None) -> Tensor:
        logits_TV: Tensor = self.lm_head(self.seam.enter(self.norm(x_TD), tokens))
        return logits_TV

    def normed(self, x_TD: Tensor) -> Tensor:
        """Rows of the last stage's result after the final norm."""
        normed_TD: Tensor = self.norm(x_TD)
        return normed_TD

    def scores(self, x_TD: Tensor, tokens: int | None = None) -> Tensor:
        """What the classification head of a model that has one (`num_labels`) makes of them, [T, labels]."""
        scores_TL: Tensor = self.score(self.seam.enter(self.norm(x_TD), tokens))
        return scores_TL

    @property
    def hidden_size(self) -> int:
        """The model's width D."""
        return self.spec.hidden_size

    @property
    def scales_by_length(self) -> bool:
        """Whether rope goes by the length of a sequence, so that `forward` reads `lengths_T`."""
        return self.spec.scales_by_length

    def attention_specs(self) -> dict[int, AttentionSpec]:
        """How each layer held here attends, by global layer number, but for those that have a state."""
        layers = self._own_layers().items()
        return {n: layer.attention.spec for n, layer in layers if not isinstance(layer.attention, GatedDeltaNet)}

    def state_shapes(self) -> dict[int, StateShape]:
        """The shapes of one sequence's state in each layer held here that has one."""
        layers = self._own_layers().items()
        return {n: layer.attention.state_shape for n, layer in layers if isinstance(layer.attention, GatedDeltaNet)}

    def _own_layers(self) -> dict[int, Layer]:
        return {int(number): cast(Layer, layer) for number, layer in self.layers.items()}


def build(spec: ModelSpec, mesh: Mesh, dtype: torch.dtype, device: torch.device | str | None = None) -> Transformer:
    """A stage's model with parameters allocated but not filled; on device "meta" it takes no memory."""
    with torch.device(device) if device is not None else nullcontext():
        model = Transformer(spec, mesh)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(held_dtype(parameter, dtype))
    return model
