"""Inputs that each layer has of its own for each token (gemma4 of E2B and E4B): P widths a layer.

They come from a table of the vocabulary for each layer, and from the token's embedding. A stage has the columns of its
own layers alone. All of it stands outside of the cut layers, but for the table, whose rows are cut between ranks.
"""

from __future__ import annotations

from torch import Tensor, nn

from tllm.model.mlp import ACTIVATIONS
from tllm.model.norm import RMSNorm
from tllm.parallel.embedding import VocabEmbedding
from tllm.parallel.linear import WholeLinear
from tllm.parallel.mesh import Mesh
from tllm.parallel.shard import Shard, ShardPiece, cut_parameter
from tllm.spec.model_spec import ModelSpec


class PerLayerInputs(nn.Module):
    """ids_T and their scaled embeddings e_TD -> [T, layers, P] of the layers held here:

    (norm(projection(e) / sqrt(D)) + sqrt(P) table[ids]) / sqrt(2)
    """

    def __init__(self, spec: ModelSpec, mesh: Mesh) -> None:
        super().__init__()
        self.width, D = spec.per_layer_width, spec.hidden_size
        columns = (mesh.layers.start * self.width, mesh.layers.stop * self.width)
        vocab = mesh.cut.vocab
        piece = ShardPiece("model.embed_tokens_per_layer.weight", (vocab, columns))
        table = cut_parameter((vocab[1] - vocab[0], columns[1] - columns[0]), Shard((piece,)))
        self.embed_tokens = VocabEmbedding(table, vocab, mesh.seam, self.width**0.5)
        self.projection = WholeLinear("model.per_layer_model_projection", columns, D, mesh.seam.gradient)
        self.norm = RMSNorm("model.per_layer_projection_norm", self.width, spec.norm_eps, mesh.seam.gradient)
        self.scale = D**-0.5

    def forward(self, ids_T: Tensor, e_TD: Tensor) -> Tensor:
        of_token_TLP = self.embed_tokens(ids_T).unflatten(-1, (-1, self.width))
        projected_TLP = (self.projection(e_TD) * self.scale).unflatten(-1, (-1, self.width))
        inputs_TLP: Tensor = (self.norm(projected_TLP) + of_token_TLP) * 2**-0.5
        return inputs_TLP


class PerLayerInput(nn.Module):
    """How a layer takes its own input p_TP in: x_TD + norm(projection(act(gate(x)) * p))."""

    def __init__(self, spec: ModelSpec, mesh: Mesh, layer: str) -> None:
        super().__init__()
        P, D, gradient = spec.per_layer_width, spec.hidden_size, mesh.seam.gradient
        self.gate = WholeLinear(f"{layer}.per_layer_input_gate", (0, P), D, gradient)
        self.projection = WholeLinear(f"{layer}.per_layer_projection", (0, D), P, gradient)
        self.norm = RMSNorm(f"{layer}.post_per_layer_input_norm", D, spec.norm_eps, gradient, spec.norm_offset)
        self.act = ACTIVATIONS[spec.activation]

    def forward(self, x_TD: Tensor, p_TP: Tensor) -> Tensor:
        y_TD: Tensor = x_TD + self.norm(self.projection(self.act(self.gate(x_TD)) * p_TP))
        return y_TD
