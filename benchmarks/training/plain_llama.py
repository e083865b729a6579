"""A well-written Llama for one process in plain PyTorch, with which our training steps are compared."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn


class PlainLayer(nn.Module):
    """Merged projections, torch's own attention, norm and activation."""

    def __init__(self, config: dict[str, int]) -> None:
        super().__init__()
        D, F_ = config["hidden_size"], config["intermediate_size"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.width = D // self.heads
        self.qkv = nn.Linear(D, (self.heads + 2 * self.kv_heads) * self.width, bias=False)
        self.out = nn.Linear(D, D, bias=False)
        self.gate_up, self.down = nn.Linear(D, 2 * F_, bias=False), nn.Linear(F_, D, bias=False)
        self.first, self.second = nn.RMSNorm(D, eps=1e-6), nn.RMSNorm(D, eps=1e-6)

    def forward(self, x_BTD: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
        qkv_BTNH = self.qkv(self.first(x_BTD)).unflatten(-1, (-1, self.width))
        q, k, v = qkv_BTNH.split([self.heads, self.kv_heads, self.kv_heads], dim=2)
        q, k, v = (
            turned(q, cos_TH, sin_TH).transpose(1, 2),
            turned(k, cos_TH, sin_TH).transpose(1, 2),
            v.transpose(1, 2),
        )
        y_BNTH = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        x_BTD = x_BTD + self.out(y_BNTH.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.second(x_BTD)).chunk(2, dim=-1)
        out_BTD: Tensor = x_BTD + self.down(F.silu(gate) * up)
        return out_BTD


class PlainModel(nn.Module):
    """Takes ids_BT and returns the mean cross-entropy of the next tokens."""

    def __init__(self, config: dict[str, int], length: int) -> None:
        super().__init__()
        D, V = config["hidden_size"], config["vocab_size"]
        self.embed, self.norm, self.head = nn.Embedding(V, D), nn.RMSNorm(D, eps=1e-6), nn.Linear(D, V, bias=False)
        self.layers = nn.ModuleList(PlainLayer(config) for _ in range(config["num_hidden_layers"]))
        width = D // config["num_attention_heads"]
        frequency = 10000.0 ** (-torch.arange(0, width, 2).float() / width)
        angle_TH = torch.arange(length)[:, None] * torch.cat((frequency, frequency))
        self.register_buffer("cos_TH", angle_TH.cos())
        self.register_buffer("sin_TH", angle_TH.sin())

    def forward(self, ids_BT: Tensor) -> Tensor:
        x_BTD = self.embed(ids_BT)
        for layer in self.layers:
            x_BTD = layer(x_BTD, self.cos_TH, self.sin_TH)
        logits_BTV = self.head(self.norm(x_BTD[:, :-1]))
        return F.cross_entropy(logits_BTV.flatten(0, 1).float(), ids_BT[:, 1:].flatten())


def turned(x_BTNH: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
    """Apply rotary position embeddings to queries or keys."""
    low, high = x_BTNH.chunk(2, dim=-1)
    cos, sin = cos_TH[:, None].to(x_BTNH.dtype), sin_TH[:, None].to(x_BTNH.dtype)
    return x_BTNH * cos + torch.cat((-high, low), dim=-1) * sin


@torch.no_grad()
def plain_model(folder: Path, length: int) -> PlainModel:
    """The model with the folder's weights, in float32."""
    config = json.loads((folder / "config.json").read_text())
    model, weights = PlainModel(config, length), load_file(folder / "model.safetensors")
    model.embed.weight.copy_(weights["model.embed_tokens.weight"])
    model.norm.weight.copy_(weights["model.norm.weight"])
    model.head.weight.copy_(weights["lm_head.weight"])
    for number, layer in enumerate(model.layers):
        at = f"model.layers.{number}"
        assert isinstance(layer, PlainLayer)
        layer.qkv.weight.copy_(torch.cat([weights[f"{at}.self_attn.{p}_proj.weight"] for p in "qkv"]))
        layer.out.weight.copy_(weights[f"{at}.self_attn.o_proj.weight"])
        layer.gate_up.weight.copy_(torch.cat([weights[f"{at}.mlp.{p}_proj.weight"] for p in ("gate", "up")]))
        layer.down.weight.copy_(weights[f"{at}.mlp.down_proj.weight"])
        layer.first.weight.copy_(weights[f"{at}.input_layernorm.weight"])
        layer.second.weight.copy_(weights[f"{at}.post_attention_layernorm.weight"])
    return model
