"""What a model is, in plain numbers: `ModelSpec`, made from a Hugging Face `config.json` by `spec.families`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tllm.spec.quantized.weight_bits import Quantization

QkNorm = Literal["none", "head", "full"]
NormOrder = Literal["pre", "post", "both"]
RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope", "factors", "proportional"]


@dataclass(frozen=True)
class RopeSpec:
    """One rotary embedding: base `theta` over the first `dim` of a head's widths, and how long contexts are scaled.

    `original` is the context the model was first trained for. `factors` are what each pair's frequency is divided by,
    where a file says only that. `interleaved`: neighbouring widths are a pair (glm4, ernie4_5), not one of each half.
    `turned`: of kind "proportional" only the first widths of each half turn, so many in all; others stay as they are
    (gemma4).
    `query_scale_beta`: queries are multiplied by 1 + beta ln(1 + floor(position / original)) besides (ministral3).
    Sources: RoFormer (2104.09864), YaRN (2309.00071), LongRoPE (2402.13753), the Llama 3.1 model card.
    """

    theta: float
    dim: int
    kind: RopeKind = "default"
    factor: float = 1.0
    original: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    short_factor: tuple[float, ...] = ()
    interleaved: bool = False
    query_scale_beta: float = 0.0
    factors: tuple[float, ...] = ()
    turned: int = 0


@dataclass(frozen=True)
class MoeSpec:
    """A mixture-of-experts MLP: each token goes to `top_k` of `num_experts`, and to a shared expert if there is one.

    `scores`: what the router's logits become: their softmax, the sigmoid of each (2408.15664, 2412.19437), or the
    softmax of the chosen ones alone (gpt_oss). `renormalise` makes the chosen weights add up to 1, and `weight_scale`
    multiplies them then. `correction_bias`: a number for each expert is added to its score when experts are chosen, and
    not to its weight. Experts are chosen from the `top_groups` of `groups` groups whose `group_best` best scores add up
    to most. `shared_gate`: the shared expert is multiplied by the sigmoid of a gate of its own. `clamp`: experts have
    biases, each tensor of the checkpoint holds all of them, and the activation is gate sigmoid(alpha gate) (up + 1),
    with gate at most `clamp` and up within it. `beside_mlp`: what is shared is the layer's dense MLP with norms of its
    own, and the router norms its rows and has a weight of each expert (gemma4). `style` names the checkpoint's tensors.
    """

    num_experts: int
    top_k: int
    width: int
    shared_width: int = 0
    shared_gate: bool = True
    scores: Literal["softmax", "sigmoid", "chosen_softmax"] = "softmax"
    renormalise: bool = True
    weight_scale: float = 1.0
    correction_bias: bool = False
    groups: int = 1
    top_groups: int = 1
    group_best: int = 2
    router_bias: bool = False
    clamp: float | None = None
    alpha: float = 1.702
    beside_mlp: bool = False
    style: Literal["mixtral", "qwen", "glm", "minimax", "gpt_oss", "gemma4"] = "qwen"


@dataclass(frozen=True)
class LatentSpec:
    """Multi-head latent attention (2405.04434): all heads' keys and values are made of one latent for each token.

    The latent has `width` widths, and `rope_dim` rotated widths of a key go with it, the same for all heads. A query
    head has `plain_dim` widths that are not rotated beside them, a value head `value_dim`. Queries come from a latent
    of `q_width` widths, or from the hidden state itself (0).
    """

    width: int
    rope_dim: int
    plain_dim: int
    value_dim: int
    q_width: int = 0
    norm_eps: float = 1e-6

    @property
    def query_dim(self) -> int:
        """Widths of a query head."""
        return self.plain_dim + self.rope_dim

    @property
    def latents(self) -> int:
        """Widths that every rank makes of a token's hidden state: both latents and the rotated key."""
        return self.q_width + self.width + self.rope_dim


@dataclass(frozen=True)
class DeltaSpec:
    """A gated delta net (2412.06464) in attention's place: each value head has a state, [key_dim, value_dim].

    `value_heads` share `key_heads` evenly, whose queries and keys they use. What goes into the state comes through a
    causal convolution over the last `kernel` tokens. `fused`: the checkpoint has queries, keys, values and gates as one
    tensor, by key heads (qwen3_next), not a tensor of each kind (qwen3_5); `fused_ba`: so it has the betas and alphas.
    `tiled`: value head n uses key head n % key_heads (qwen3_5 in GGUF files), and not the n // group-th.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    fused: bool = False
    fused_ba: bool = False
    tiled: bool = False

    @property
    def group(self) -> int:
        """Value heads that use one key head."""
        return self.value_heads // self.key_heads

    def key_head(self, value_head: int) -> int:
        """The key head that a value head uses."""
        return value_head % self.key_heads if self.tiled else value_head // self.group


@dataclass(frozen=True)
class LayerSpec:
    """One transformer layer: how far it sees (`window` keys, None: all), its rope (None: it has none), its MLP.

    With `delta` it has a gated delta net and no attention. `head_dim` and `num_kv_heads` are its own, or 0 where they
    are the model's, as is `mlp_width`. `keys_are_values`: its values are its keys as they were before their norm and
    rope. `shares_keys`: it has no keys and values of its own and uses an earlier layer's (both gemma4; which layer's,
    `ModelSpec.key_source` says).
    """

    rope: RopeSpec | None
    window: int | None = None
    moe: MoeSpec | None = None
    delta: DeltaSpec | None = None
    head_dim: int = 0
    num_kv_heads: int = 0
    keys_are_values: bool = False
    shares_keys: bool = False
    mlp_width: int = 0

    @property
    def hidden_sums(self) -> int:
        """Hidden states of each token that ranks which share the layer sum: attention's, the MLP's, and the experts'
        where they stand beside it."""
        return 3 if self.moe is not None and self.moe.beside_mlp else 2


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer, every choice that changes its maths spelled out.

    `norm_order`: RMSNorm before each half layer, after it (olmo2), or both (gemma). `norm_offset`: the norm multiplies
    by 1 + weight (gemma). `qk_norm`: none, over each head (qwen3), or over all heads together (olmo2).
    `norm_names`: the checkpoint's names of the norms, where they are not those that go with their order.
    `gated`: the MLP is down(act(gate) * up), and down(act(up)) otherwise (arcee).
    `fused_qkv`, `fused_gate_up`: the checkpoint holds q, k and v, or gate and up, as one tensor (phi3, glm4).
    `residual_scale`: what each half layer adds is multiplied by it; `logits_scaling`: logits are divided by it (both
    granite).
    `latent`: attention is over latents. `head_dim` is then the widths of a latent with its rotated key, which is the
    one key-value head of all query heads, and is in the cache once, as key and as value.
    `attention_gate`: what a head of attention gives is multiplied by the sigmoid of a gate, whose rows follow the
    head's rows of the query (2505.06708, qwen3_next).
    `attention_sinks`: each query head has a score that joins its softmax and has no value (2309.17453, gpt_oss).
    `value_norm`: each head's values are divided by their root mean square. `layer_scale`: what a layer gives is
    multiplied by a number of the checkpoint's, which training leaves as it is (both gemma4).
    `per_layer_width`: each layer has so wide an input of its own for each token, made of a table of its own and of the
    token's embedding (gemma4 of E2B and E4B); 0 where layers have none.
    `bidirectional`: a token sees those after it too, of a window as many each way: the model embeds, and cannot write.
    `num_labels`: the model ends in a classification head of so many labels, and has none for tokens; 0 for those that
    write. `is_headless`: it was saved without a head, and its embedding is none: it embeds and does nothing else.
    `quantization`: which weights are held in few bits, and how; None where all are held as plain numbers.
    `max_model_len`: the longest sequence this version computes exactly as the model defines it.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    activation: str
    max_model_len: int
    attention_scale: float
    tied: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: QkNorm = "none"
    norm_order: NormOrder = "pre"
    norm_names: tuple[str, ...] = ()
    norm_offset: bool = False
    attention_softcap: float | None = None
    attention_sinks: bool = False
    attention_gate: bool = False
    value_norm: bool = False
    layer_scale: bool = False
    per_layer_width: int = 0
    latent: LatentSpec | None = None
    final_softcap: float | None = None
    embedding_scale: float = 1.0
    noise_scale: float = 1.0
    """What noise on embeddings is multiplied by: they are scaled behind it where the family scales hidden states."""
    residual_scale: float = 1.0
    logits_scaling: float = 1.0
    gated: bool = True
    fused_qkv: bool = False
    fused_gate_up: bool = False
    bidirectional: bool = False
    num_labels: int = 0
    is_headless: bool = False
    dtype: str = "float32"
    quantization: Quantization | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def writes(self) -> bool:
        """Whether it has a head for tokens and may write them; else it embeds or scores."""
        return not (self.num_labels or self.is_headless or self.bidirectional)

    def hidden_state(self, number: int) -> int | None:
        """Which of the model's hidden states a number means that may count from the end; None where there is none.

        They are numbered as `transformers` numbers `hidden_states`: 0 is the embedding, n what comes to layer n, and
        `num_layers` what the final norm gives.
        """
        counted = number + self.num_layers + 1 if number < 0 else number
        return counted if 0 <= counted <= self.num_layers else None

    @property
    def delta(self) -> DeltaSpec | None:
        """The gated delta net of those layers that have one; None where all layers have attention."""
        return next((layer.delta for layer in self.layers if layer.delta), None)

    @property
    def cached_width(self) -> int:
        """Numbers of the cache for each token and key-value head."""
        return self.head_dim if self.latent else 2 * self.head_dim

    def key_source(self, number: int) -> int:
        """The layer whose keys and values layer `number` attends to: itself, or where it shares them the last one
        before it that has its own and sees as far."""
        layer = self.layers[number]
        if not layer.shares_keys:
            return number
        before = range(number - 1, -1, -1)
        return next(n for n in before if not self.layers[n].shares_keys and self.layers[n].window == layer.window)

    def is_key_source(self, number: int) -> bool:
        """Whether later layers attend to the keys and values of layer `number`."""
        return number in self.key_sources(range(number + 1, self.num_layers), number + 1)

    def key_sources(self, layers: range, before: int) -> tuple[int, ...]:
        """The layers before layer `before` whose keys and values some of `layers` attend to."""
        if not any(self.layers[n].shares_keys for n in layers):
            return ()
        return tuple(sorted({source for n in layers if (source := self.key_source(n)) < before}))

    def carried_sources(self, start: int) -> tuple[int, ...]:
        """The layers before `start` whose keys and values layers from there on attend to. A stage that begins there is
        given what came into these layers, and makes the same keys and values of it."""
        return self.key_sources(range(start, self.num_layers), start)

    def carried_width(self, start: int) -> int:
        """Numbers of a token that go to a stage whose first layer is `start`: the hidden state, with layers' own inputs
        the embedding, and what came into the layers of `carried_sources`."""
        return self.hidden_size * (1 + (self.per_layer_width > 0) + len(self.carried_sources(start)))

    @property
    def widest_hop(self) -> int:
        """The most numbers of a token that go from a stage to the next, wherever a pipeline is cut."""
        if not (self.per_layer_width or any(layer.shares_keys for layer in self.layers)):
            return self.hidden_size
        return max(self.carried_width(start) for start in range(1, self.num_layers + 1))

    @property
    def into_mlp(self) -> int:
        """Matrices of the MLP before its activation: gate and up, or up alone."""
        return 2 if self.gated else 1

    @property
    def scales_by_length(self) -> bool:
        """Whether a token's rotation depends on the length of its sequence (dynamic rope)."""
        return any(layer.rope is not None and layer.rope.kind == "dynamic" for layer in self.layers)
