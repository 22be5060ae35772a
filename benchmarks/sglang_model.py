"""Small models of absorbed MLA with the shapes of DeepSeek-V2-Lite, around SGLang's attention layer.

`random_weights` draws every matrix. `recalling_weights` sets them so that greedy decoding is known and far from ties:
layer 0 finds the previous token by position, layer 1 the earlier occurrence of the current token and what followed it,
with all heads needed for either. Both are bf16, with float32 norms, rotary angles and logits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from sglang_server import LATENT, ROPE, SCALE, make_layer
from torch.nn.functional import rms_norm, silu

NOPE = VALUE = 128
CODE, RECALLED = 512, 256
"""Features of a token's code in the residual stream of a recalling model; those of them that it recalls."""


@dataclass(frozen=True)
class LayerWeights:
    """One layer.

    q [hidden, heads * (NOPE + ROPE)], kv [hidden, LATENT + ROPE], key_up [heads, NOPE, LATENT],
    value_up [heads, LATENT, VALUE], out [heads * VALUE, hidden], gate and up [hidden, inner], down [inner, hidden].
    """

    q: torch.Tensor
    kv: torch.Tensor
    key_up: torch.Tensor
    value_up: torch.Tensor
    out: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True)
class Weights:
    """``embedding`` [vocabulary, hidden], ``head`` [hidden, vocabulary], and the layers between."""

    embedding: torch.Tensor
    head: torch.Tensor
    layers: tuple[LayerWeights, ...]


@dataclass(frozen=True)
class Sizes:
    """What a model is made of."""

    vocabulary: int = 16384
    hidden: int = 2048
    inner: int = 4096
    heads: int = 16
    layers: int = 3


def random_weights(sizes: Sizes, seed: int, device: str, sharpness: float = 1.0) -> Weights:
    """Every entry normal, scaled by the square root of what it is summed over; queries ``sharpness`` times as long."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, gain: float = 1.0) -> torch.Tensor:
        values = torch.randn(shape, generator=generator, device=device) * gain / math.sqrt(shape[-2])
        return values.to(torch.bfloat16)

    hidden, heads, inner = sizes.hidden, sizes.heads, sizes.inner
    layers = tuple(
        LayerWeights(
            q=normal(hidden, heads * (NOPE + ROPE), gain=sharpness),
            kv=normal(hidden, LATENT + ROPE),
            key_up=normal(heads, NOPE, LATENT),
            value_up=normal(heads, LATENT, VALUE),
            out=normal(heads * VALUE, hidden),
            gate=normal(hidden, inner),
            up=normal(hidden, inner),
            down=normal(inner, hidden),
        )
        for _ in range(sizes.layers)
    )
    embedding = torch.randn(sizes.vocabulary, hidden, generator=generator, device=device).to(torch.bfloat16)
    return Weights(embedding, normal(hidden, sizes.vocabulary), layers)


def recalling_weights(sizes: Sizes, seed: int, device: str) -> Weights:
    """A model that goes on as its text went on before; needs 2 layers and a hidden size over 1281.

    Features of the residual stream: a token's code of signs, the code of the token before it (from layer 0), the first
    `RECALLED` of the code of the token to come (from layer 1), a constant. The feed-forward parts are random and small.
    """
    generator = torch.Generator(device).manual_seed(seed)
    token, before, coming, constant = 0, CODE, 2 * CODE, 2 * CODE + RECALLED
    hidden, heads = sizes.hidden, sizes.heads
    codes = torch.randint(2, (sizes.vocabulary, CODE), generator=generator, device=device) * 2.0 - 1
    embedding = torch.zeros(sizes.vocabulary, hidden, device=device)
    embedding[:, token : token + CODE] = codes
    embedding[:, constant] = 8
    head = torch.zeros(hidden, sizes.vocabulary, device=device)
    head[coming:constant] = codes[:, :RECALLED].T / RECALLED
    first, second = (_empty_layer(sizes, generator, device) for _ in range(2))

    first.kv[token : token + CODE, :LATENT] = torch.eye(CODE, device=device)
    norm_of_constant = 8 / math.sqrt((CODE + 64) / hidden)
    strength = 14 / norm_of_constant  # 15 nats between the token before and its neighbours
    pairs = torch.zeros(ROPE, device=device)
    pairs[: ROPE // 2] = strength
    first.kv[constant, LATENT:] = pairs
    back = rotated(pairs.expand(1, ROPE), *rotary_table(-1, 1, device))[0]
    q = first.q.view(hidden, heads, NOPE + ROPE)
    q[constant, :, NOPE:] = back
    _copy_latent(first, heads, start=0, count=CODE // heads, to=before)

    half = RECALLED // 2
    second.kv[before : before + RECALLED, :RECALLED] = torch.eye(RECALLED, device=device)
    second.kv[token : token + RECALLED, RECALLED : 2 * RECALLED] = torch.eye(RECALLED, device=device)
    q = second.q.view(hidden, heads, NOPE + ROPE)
    for index in range(heads):
        mine = index % 2 * half
        q[token + mine : token + mine + half, index, :half] = 3 * torch.eye(half, device=device)
        second.key_up[index, :half, mine : mine + half] = torch.eye(half, device=device)
    _copy_latent(second, heads, start=RECALLED, count=RECALLED // heads, to=coming)
    return _in_bf16(Weights(embedding, head, (first, second)))


def _empty_layer(sizes: Sizes, generator: torch.Generator, device: str) -> LayerWeights:
    hidden, heads, inner = sizes.hidden, sizes.heads, sizes.inner

    def small(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device) / math.sqrt(shape[-2]) / 4

    return LayerWeights(
        q=torch.zeros(hidden, heads * (NOPE + ROPE), device=device),
        kv=torch.zeros(hidden, LATENT + ROPE, device=device),
        key_up=torch.zeros(heads, NOPE, LATENT, device=device),
        value_up=torch.zeros(heads, LATENT, VALUE, device=device),
        out=torch.zeros(heads * VALUE, hidden, device=device),
        gate=small(hidden, inner),
        up=small(hidden, inner),
        down=small(inner, hidden),
    )


def _copy_latent(layer: LayerWeights, heads: int, *, start: int, count: int, to: int) -> None:
    """Each head brings ``count`` columns of the latent it attends to, from ``start`` on, to the residual stream."""
    one = torch.eye(count, device=layer.out.device)
    for index in range(heads):
        layer.value_up[index, start + index * count : start + (index + 1) * count, :count] = one
        layer.out[index * VALUE : index * VALUE + count, to + index * count : to + (index + 1) * count] = one


def _in_bf16(weights: Weights) -> Weights:
    layers = tuple(
        LayerWeights(**{name: value.to(torch.bfloat16) for name, value in vars(layer).items()})
        for layer in weights.layers
    )
    return Weights(weights.embedding.to(torch.bfloat16), weights.head.to(torch.bfloat16), layers)


def rotary_table(start: int, count: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [count, ROPE / 2] of positions from ``start`` on."""
    frequency = 10000.0 ** (-torch.arange(ROPE // 2, device=device) / (ROPE // 2))
    angle = torch.arange(start, start + count, device=device)[:, None] * frequency
    return angle.cos(), angle.sin()


def rotated(values: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """The halves of the last axis turned as pairs, in float32."""
    left, right = values.float().chunk(2, dim=-1)
    return torch.cat([left * cosine - right * sine, right * cosine + left * sine], dim=-1)


class TinyMla:
    """The model. A call takes SGLang's batch and returns the two highest logits of each node and their tokens."""

    def __init__(self, sizes: Sizes, weights: Weights, context: int, device: str) -> None:
        self.sizes, self.weights = sizes, weights
        self._head = weights.head.float()
        self._attention = [
            make_layer(sizes.heads, layer_id=index, scaling=SCALE) for index in range(len(weights.layers))
        ]
        self._cosine, self._sine = rotary_table(0, context, device)

    def __call__(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """(float32 [nodes, 2], int64 [nodes, 2]), highest first."""
        hidden = self.weights.embedding[batch.input_ids]
        rotation = self._cosine[batch.positions][:, None], self._sine[batch.positions][:, None]
        for layer, attention in zip(self.weights.layers, self._attention, strict=True):
            hidden = hidden + self._attend(layer, attention, _normed(hidden), rotation, batch)
            normed = _normed(hidden)
            hidden = hidden + (silu(normed @ layer.gate) * (normed @ layer.up)) @ layer.down
        logits = _normed(hidden).float() @ self._head
        return tuple(torch.topk(logits, 2))  # type: ignore[return-value]

    def _attend(self, layer: LayerWeights, attention: Any, hidden: Any, rotation: Any, batch: Any) -> torch.Tensor:
        heads = self.sizes.heads
        q = (hidden @ layer.q).view(-1, heads, NOPE + ROPE)
        absorbed = torch.einsum("thn,hnl->thl", q[..., :NOPE], layer.key_up)
        q = torch.cat([absorbed, rotated(q[..., NOPE:], *rotation).to(q.dtype)], dim=-1)
        kv = (hidden @ layer.kv)[:, None]
        latent = _normed(kv[..., :LATENT])
        k = torch.cat([latent, rotated(kv[..., LATENT:], *rotation).to(kv.dtype)], dim=-1)
        attended = attention(q, k, latent, batch).view(-1, heads, LATENT)
        return torch.einsum("thl,hlv->thv", attended, layer.value_up).flatten(1) @ layer.out


def _normed(values: torch.Tensor) -> torch.Tensor:
    return rms_norm(values.float(), values.shape[-1:], eps=1e-6).to(values.dtype)
