"""The one model definition: `Transformer`, layers [start, stop) of any family, cut or whole, served or trained."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cached_property
from typing import cast

import torch
from torch import Tensor, nn

from tllm.model.attention import Attend, AttentionSpec
from tllm.model.gated_delta_net import GatedDeltaNet
from tllm.model.layer import Layer, Observe, norm_of, unobserved
from tllm.model.per_layer_input import PerLayerInputs
from tllm.model.recurrence import StateShape
from tllm.model.rope import rotations
from tllm.model.shared_keys import EMBEDDING, CarriedRows, KeptKeys, SharedKeyAttention
from tllm.parallel.linear import Adapt, ColumnLinear, LinearRows, unadapted
from tllm.parallel.mesh import Mesh
from tllm.parallel.shard import held_dtype
from tllm.spec.model_spec import ModelSpec, RopeSpec


class Transformer(nn.Module):
    """The layers of one stage. The first stage also embeds token ids, the last also makes logits, or with a
    classification head in place of that for tokens (`spec.num_labels`) scores.

    forward: ids_T (first stage) or x_TD, and positions_T -> x_TD after this stage's layers.
    `adapt` adds what adapters add to linears and embeddings; `observe` sees the hidden states before each layer.
    logits: x_TD (rows of the last stage's result) -> logits_TV for this rank's part of the vocabulary, `vocab`.
    With sequence parallelism x_TD of forward and logits is this rank's slice of the tokens, and `tokens` tells how
    many there are; positions and logits are of all tokens.
    Of models whose layers have inputs of their own or share keys, more than the hidden state goes from stage to stage,
    side by side in one x (`ModelSpec.carried_width`), and later stages are given `ids_T` too.
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
            table = mesh.cut_layers.table(name, self.vocab, width, replicated=spread)
            self.embed_tokens = mesh.cut_layers.embedding(table, self.vocab, spec.embedding_scale)
        own_inputs = spec.per_layer_width > 0 and len(mesh.layers) > 0
        self.layer_inputs = PerLayerInputs(spec, mesh) if own_inputs else None
        self.carried = CarriedRows(spec, mesh)
        self.layers = nn.ModuleDict({str(i): Layer(spec, mesh, i) for i in mesh.layers})
        if self.is_last:
            self.norm = norm_of(spec, mesh, "model.norm")
            if spec.num_labels:
                self.score = ColumnLinear(width, [LinearRows("score", 0, spec.num_labels)], replicated=True)
                return
            if spec.tied and self.is_first:
                head = cast(nn.Parameter, self.embed_tokens.weight)
            else:
                of_head = name if spec.tied else "lm_head.weight"
                head = mesh.cut_layers.table(of_head, self.vocab, width, replicated=spread)
            self.lm_head = mesh.cut_layers.logits(head, self.vocab, spec.final_softcap, spec.logits_scaling)

    def forward(
        self,
        x: Tensor,
        positions_T: Tensor,
        attend: Attend,
        lengths_T: Tensor | None = None,
        adapt: Adapt = unadapted,
        ids_T: Tensor | None = None,
        observe: Observe = unobserved,
    ) -> Tensor:
        x_TD, beside = (self.embed_tokens(x, adapt), {}) if self.is_first else self.carried.received(x)
        ids_T, tokens = x if self.is_first else ids_T, len(positions_T)
        e_TD = beside.setdefault(EMBEDDING, x_TD)
        inputs_TLP = None if self.layer_inputs is None else self.layer_inputs(ids_T, e_TD)
        turned = rotations(self.ropes, positions_T, x_TD.dtype, lengths_T)
        if self.carried.sources:
            attend = KeptKeys(attend, self.carried.sources)
            for number, keys in self.carried.borrowed.items():
                attend.kept[number] = keys(beside[number], turned[keys.rope], tokens, adapt)
        for place, (number, layer) in enumerate(self.own_layers.items()):
            if number in self.carried.goes:
                beside[number] = x_TD
            p_TP = None if inputs_TLP is None else inputs_TLP[:, place]
            x_TD = layer(observe(number, x_TD), turned[layer.rope], attend, tokens, adapt, p_TP)
        return self.carried.given(x_TD, beside)

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
    def received_width(self) -> int:
        """Numbers of a token that come to this stage from the one before it."""
        return self.carried.width

    @property
    def scales_by_length(self) -> bool:
        """Whether rope goes by the length of a sequence, so that `forward` reads `lengths_T`."""
        return self.spec.scales_by_length

    def attention_specs(self) -> dict[int, AttentionSpec]:
        """How each layer whose keys are made here attends, by global layer number."""
        borrowed = {n: keys.spec for n, keys in self.carried.borrowed.items()}
        without, own = (GatedDeltaNet, SharedKeyAttention), self.own_layers.items()
        return borrowed | {n: layer.attention.spec for n, layer in own if not isinstance(layer.attention, without)}

    def state_shapes(self) -> dict[int, StateShape]:
        """The shapes of one sequence's state in each layer held here that has one."""
        layers = self.own_layers.items()
        return {n: layer.attention.state_shape for n, layer in layers if isinstance(layer.attention, GatedDeltaNet)}

    @cached_property
    def ropes(self) -> set[RopeSpec]:
        """Those of the layers held here, each once."""
        ropes = {own.rope for own in self.own_layers.values()} | {keys.rope for keys in self.carried.borrowed.values()}
        return {rope for rope in ropes if rope is not None}

    @cached_property
    def own_layers(self) -> dict[int, Layer]:
        """The layers held here by their numbers, in order."""
        return {int(number): cast(Layer, layer) for number, layer in self.layers.items()}


def build(spec: ModelSpec, mesh: Mesh, dtype: torch.dtype, device: torch.device | str | None = None) -> Transformer:
    """A stage's model with parameters allocated but not filled; on device "meta" it takes no memory."""
    with torch.device(device) if device is not None else nullcontext():
        model = Transformer(spec, mesh)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(held_dtype(parameter, dtype))
    return model
