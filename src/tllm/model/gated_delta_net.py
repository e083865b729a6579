"""The gated delta net of one layer (Gated Delta Networks, 2412.06464): a state in place of keys and values.

Each value head keeps a matrix S that maps keys to values. A token with key k, value v and query q lets the state fade
by alpha, corrects what it says of k by the share beta, and reads it (equation 10):

    S' = alpha S        S = S' + beta k (v - k S')^T        o = q S

Letters beside those of WORDS.md, here only: K and V are the widths of a key and a value, G are key heads, N value
heads, C channels of the convolution, L the tokens of one chunk.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tllm.kernels.batch_invariant import is_batch_invariant, sigmoid, silu, softplus
from tllm.kernels.rows.torch_steps import widen
from tllm.model.attention import Attend
from tllm.model.recurrence import State, StateShape
from tllm.model.rope import Rotation
from tllm.parallel.linear import Adapt, ColumnLinear, LinearRows, RowLinear, unadapted
from tllm.parallel.mesh import Mesh
from tllm.parallel.shard import Shard, ShardPiece, cut_parameter
from tllm.spec.cut import Range, size
from tllm.spec.model_spec import DeltaSpec, ModelSpec

CHUNK = 64
"""Tokens that are worked out together: more make larger products, and more of them."""

Rule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(S, q, k, v, log alpha, beta) of some tokens -> (o, the next S)"""

UNIT_EPS = 1e-6
"""Added to the square of a query's or key's length, by which it is divided."""


class GatedDeltaNet(nn.Module):
    """x_TD -> x_TD, over the value heads held here and the key heads that they use.

    Its state for each sequence: the convolution's last inputs [kernel - 1, C], and S of each value head [N, K, V].
    """

    def __init__(self, spec: ModelSpec, mesh: Mesh, layer: int, name: str) -> None:
        super().__init__()
        of = spec.layers[layer].delta
        assert of is not None
        self.layer, self.of = layer, of
        values, keys = mesh.cut.value_heads, mesh.cut.key_heads
        N, G = size(values), size(keys)
        self.channels = [G * of.key_dim, G * of.key_dim, N * of.value_dim]
        self.widths = [sum(self.channels), N * of.value_dim, N, N]
        shared = mesh.tp.size > 1
        self.in_proj = ColumnLinear(spec.hidden_size, in_proj_rows(of, values, keys, name), replicated=shared)
        self.dt_bias = cut_parameter((N,), Shard((ShardPiece(f"{name}.dt_bias", (values,)),)))
        self.A_log = cut_parameter((N,), Shard((ShardPiece(f"{name}.A_log", (values,)),)))
        self.conv = _convolution(of, values, keys, name, shared)
        weight = ShardPiece(f"{name}.norm.weight")
        self.norm = cut_parameter((of.value_dim,), Shard((weight,), True, "partial"))
        columns = (values[0] * of.value_dim, values[1] * of.value_dim)
        self.out_proj = RowLinear(f"{name}.out_proj", columns, spec.hidden_size, mesh.seam)
        self.key_of = [of.key_head(head) - keys[0] for head in range(*values)]
        self.eps = spec.norm_eps

    @property
    def state_shape(self) -> StateShape:
        """The shape of each tensor of one sequence's state."""
        of = self.of
        return (of.kernel - 1, sum(self.channels)), (len(self.key_of), of.key_dim, of.value_dim)

    def forward(self, x_TD: Tensor, rotation: Rotation | None, attend: Attend, adapt: Adapt = unadapted) -> Tensor:
        mixed_TC, z_TF, b_TN, a_TN = torch.split(self.in_proj(x_TD, adapt), self.widths, dim=-1)
        beta_TN = sigmoid(widen(b_TN))
        log_alpha_TN = -widen(self.A_log).exp() * softplus(widen(a_TN) + widen(self.dt_bias))
        o_TNV = attend.recur(self.layer, self.advance, mixed_TC, log_alpha_TN, beta_TN)
        o_TNV = self.gated_norm(o_TNV, z_TF.view(o_TNV.shape))
        y_TD: Tensor = self.out_proj(o_TNV.flatten(1).to(x_TD.dtype), adapt)
        return y_TD

    def advance(self, state: State | None, *rows: Tensor) -> tuple[Tensor, State]:
        """Some tokens further (an `Advance`): rows are what goes into the convolution, log alpha and beta."""
        mixed_BTC, log_alpha_BTN, beta_BTN = rows
        if state is None:
            state = tuple(log_alpha_BTN.new_zeros(len(mixed_BTC), *shape) for shape in self.state_shape)
        last_BWC, S_BNKV = state
        seen_BTC = torch.cat((last_BWC, mixed_BTC.to(last_BWC.dtype)), dim=1)
        mixed_BTC = silu(causal_convolution(seen_BTC, self.conv))
        q_BTC, k_BTC, v_BTC = torch.split(mixed_BTC, self.channels, dim=-1)
        q_BNTK, k_BNTK = (unit(self._key_heads(x_BTC)) for x_BTC in (q_BTC, k_BTC))
        v_BNTV = v_BTC.reshape(*v_BTC.shape[:2], -1, self.of.value_dim).transpose(1, 2)
        of_heads = (x_BTN.transpose(1, 2) for x_BTN in (log_alpha_BTN, beta_BTN))
        rule = self._rule(mixed_BTC.shape[1])
        o_BNTV, S_BNKV = rule(S_BNKV, q_BNTK * self.of.key_dim**-0.5, k_BNTK, v_BNTV, *of_heads)
        return o_BNTV.transpose(1, 2), (seen_BTC[:, mixed_BTC.shape[1] :], S_BNKV)

    def _rule(self, tokens: int) -> Rule:
        """How so many tokens are gone over."""
        if is_batch_invariant(self.A_log) and not torch.is_grad_enabled():
            return token_by_token
        return recurrent_rule if tokens == 1 else chunked_rule

    def gated_norm(self, o_TNV: Tensor, z_TNV: Tensor) -> Tensor:
        """w o / sqrt(mean(o²) + eps), times silu(z), for each head."""
        normed_TNV = o_TNV * torch.rsqrt(o_TNV.square().mean(-1, keepdim=True) + self.eps)
        return self.norm * normed_TNV * silu(widen(z_TNV))

    def _key_heads(self, x_BTC: Tensor) -> Tensor:
        """The query or key of each value head, [B, N, T, K]."""
        B, T, _ = x_BTC.shape
        return x_BTC.reshape(B, T, -1, self.of.key_dim)[:, :, self.key_of].transpose(1, 2)


def causal_convolution(seen_BTC: Tensor, weight_C1W: Tensor) -> Tensor:
    """Each channel's own weighted sum of a token and those before it; the first kernel - 1 tokens are only seen."""
    weight_WC = weight_C1W[:, 0].t().to(seen_BTC.dtype)
    tokens = seen_BTC.shape[1] - len(weight_WC) + 1
    mixed_BTC = seen_BTC[:, :tokens] * weight_WC[0]
    for at, w_C in enumerate(weight_WC[1:], 1):
        # A product beside the others, not one after another: a backward pass in halves counts on it.
        mixed_BTC = mixed_BTC + seen_BTC[:, at : at + tokens] * w_C
    return mixed_BTC


def unit(x: Tensor) -> Tensor:
    """x / |x|."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + UNIT_EPS)


def recurrent_rule(
    S_BNKV: Tensor, q_BN1K: Tensor, k_BN1K: Tensor, v_BN1V: Tensor, log_alpha_BN1: Tensor, beta_BN1: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of each sequence: (o, the next S).

    These are the equations above, with u = beta (v - k S') and o = q S' + (q·k) u: S is read once by q and k.
    """
    alpha_BN11 = log_alpha_BN1.exp()[..., None]
    of_q_BN1V, of_k_BN1V = (alpha_BN11 * (torch.cat((q_BN1K, k_BN1K), dim=2) @ S_BNKV)).chunk(2, dim=2)
    u_BN1V = beta_BN1[..., None] * (v_BN1V - of_k_BN1V)
    o_BN1V = of_q_BN1V + (q_BN1K * k_BN1K).sum(-1, keepdim=True) * u_BN1V
    return o_BN1V, torch.addcmul(alpha_BN11 * S_BNKV, k_BN1K.transpose(-1, -2), u_BN1V)


def token_by_token(
    S_BNKV: Tensor, q_BNTK: Tensor, k_BNTK: Tensor, v_BNTV: Tensor, log_alpha_BNT: Tensor, beta_BNT: Tensor
) -> tuple[Tensor, Tensor]:
    """One token after another, each by sums of its own: the same bits however a sequence is cut."""
    outs = []
    alpha_BNT = log_alpha_BNT.exp()
    for q_BNK, k_BNK, v_BNV, alpha_BN, beta_BN in zip(
        *(x.unbind(2) for x in (q_BNTK, k_BNTK, v_BNTV, alpha_BNT, beta_BNT)), strict=True
    ):
        S_BNKV = alpha_BN[..., None, None] * S_BNKV
        u_BNV = beta_BN[..., None] * (v_BNV - (k_BNK[..., None] * S_BNKV).sum(-2))
        S_BNKV = S_BNKV + k_BNK[..., None] * u_BNV[..., None, :]
        outs.append((q_BNK[..., None] * S_BNKV).sum(-2))
    return torch.stack(outs, 2), S_BNKV


def chunked_rule(
    S_BNKV: Tensor, q_BNTK: Tensor, k_BNTK: Tensor, v_BNTV: Tensor, log_alpha_BNT: Tensor, beta_BNT: Tensor
) -> tuple[Tensor, Tensor]:
    """Many tokens, a chunk at a time by products of matrices (section 3.3): (o, the next S).

    With gamma_t the product of a chunk's alphas up to its token t, corrections u_t of the chunk depend on each other:

        u_t = beta_t (v_t - gamma_t k_t S - sum over s < t of gamma_t / gamma_s (k_t·k_s) u_s)

    which is a triangular system. Then o_t = gamma_t q_t S + sum over s <= t of gamma_t / gamma_s (q_t·k_s) u_s.
    """
    outs = []
    chunks = (torch.split(x, CHUNK, dim=2) for x in (q_BNTK, k_BNTK, v_BNTV, log_alpha_BNT, beta_BNT))
    for q, k, v, log_alpha, beta in zip(*chunks, strict=True):
        log_gamma_BNL = log_alpha.cumsum(-1)
        gamma_BNL1 = log_gamma_BNL.exp()[..., None]
        later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
        ratio_BNLL = log_gamma_BNL[..., :, None] - log_gamma_BNL[..., None, :]
        ratio_BNLL = ratio_BNLL.masked_fill(later, float("-inf")).exp()
        k_BNKL = k.transpose(-1, -2)
        system_BNLL = beta[..., None] * (k @ k_BNKL) * ratio_BNLL
        u_BNLV = torch.linalg.solve_triangular(
            system_BNLL, beta[..., None] * (v - gamma_BNL1 * (k @ S_BNKV)), upper=False, unitriangular=True
        )
        outs.append(gamma_BNL1 * (q @ S_BNKV) + (q @ k_BNKL * ratio_BNLL) @ u_BNLV)
        S_BNKV = gamma_BNL1[..., -1:, :] * S_BNKV + (k * ratio_BNLL[..., -1, :, None]).transpose(-1, -2) @ u_BNLV
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2), S_BNKV


def in_proj_rows(of: DeltaSpec, values: Range, keys: Range, name: str) -> list[LinearRows]:
    """Rows of q, k, v, the output gates z, b (beta) and a (alpha), in this order, of the heads held here."""
    K, V = of.key_dim, of.value_dim
    if not of.fused:
        rows = [LinearRows(f"{name}.in_proj_qkv", *span) for span in _qkv_spans(of, values, keys)]
        rows.append(LinearRows(f"{name}.in_proj_z", values[0] * V, values[1] * V))
        return [*rows, *_ba_rows(of, values, keys, name)]
    R = of.group
    block = 2 * K + 2 * R * V  # rows of one key head: its query, its key, the values and gates of its value heads
    rows = [
        LinearRows(f"{name}.in_proj_qkvz", head * block + at, head * block + at + K)
        for at in (0, K)
        for head in range(*keys)
    ]
    held = _held(of, values, keys)
    rows += [
        LinearRows(f"{name}.in_proj_qkvz", head * block + at + first * V, head * block + at + last * V)
        for at in (2 * K, 2 * K + R * V)
        for head, first, last in held
    ]
    return [*rows, *_ba_rows(of, values, keys, name)]


def _qkv_spans(of: DeltaSpec, values: Range, keys: Range) -> list[Range]:
    """Of all queries, keys and values one after another, those of the heads held here."""
    K, V, v_start = of.key_dim, of.value_dim, 2 * of.key_heads * of.key_dim
    q_k = [(start + keys[0] * K, start + keys[1] * K) for start in (0, of.key_heads * K)]
    return [*q_k, (v_start + values[0] * V, v_start + values[1] * V)]


def _held(of: DeltaSpec, values: Range, keys: Range) -> list[tuple[int, int, int]]:
    """Of each key head's value heads, those [first, last) that are held here."""
    R = of.group
    return [(head, max(0, values[0] - head * R), min(R, values[1] - head * R)) for head in range(*keys)]


def _ba_rows(of: DeltaSpec, values: Range, keys: Range, name: str) -> list[LinearRows]:
    if not of.fused_ba:
        return [LinearRows(f"{name}.in_proj_{part}", *values) for part in "ba"]
    R = of.group
    return [
        LinearRows(f"{name}.in_proj_ba", head * 2 * R + at + first, head * 2 * R + at + last)
        for at in (0, R)
        for head, first, last in _held(of, values, keys)
    ]


def _convolution(of: DeltaSpec, values: Range, keys: Range, name: str, shared: bool) -> nn.Parameter:
    """Weights [C, 1, kernel] of the channels of q, k and v held here."""
    pieces, at, every = [], 0, ((0, 1), (0, of.kernel))
    for first, last in _qkv_spans(of, values, keys):
        target = (at, at + last - first)
        pieces.append(ShardPiece(f"{name}.conv1d.weight", ((first, last), *every), (target, *every)))
        at = target[1]
    return cut_parameter((at, 1, of.kernel), Shard(tuple(pieces), shared, "partial" if shared else "whole", plain=True))
