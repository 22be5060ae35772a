"""Problems of verify_mla for validation and timing: inputs, and what they must give."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from kgen.bf16 import from_bf16, to_bf16
from kgen.e4m3 import from_e4m3, to_e4m3
from kgen.families.verify_mla_binding import softmax_scale
from kgen.families.verify_mla_tiling import integer
from kgen.family import Array, Case, Layout

DISTINCT_VALUES = 1 << 22  # random numbers drawn for one array; a larger one repeats them
SAMPLED_ROWS = 8  # of a request whose reference is sampled: gathering its keys takes as long as about so many


def draw_inputs(layout: Layout, case: Case, seed: int) -> dict[str, Array | None]:
    """Input arrays by parameter name: random numbers, trees, and slots of a pool with holes."""
    options, rng = case.options, np.random.default_rng(seed)
    head_dim = integer(layout, "latent") + integer(layout, "rope")
    prefixes, nodes = options["prefixes"], options["nodes"]
    tokens, page = sum(nodes), integer(layout, "page_size")
    in_pool = options.get("draft", "tensor") == "pool"
    lengths = [p + (n if in_pool else 0) for p, n in zip(prefixes, nodes, strict=True)]
    slots, pool_rows = _scatter(lengths, page, rng)
    prefix_slots = [row[:p] for row, p in zip(slots, prefixes, strict=True)]
    if options.get("padded"):
        prefix_slots[-1][:] = 0
    draft_slots = [row[p:] for row, p in zip(slots, prefixes, strict=True)]

    def index(name: str, values: Array) -> Array:
        return values.astype(np.int64 if name in options.get("wide", ()) else np.int32)

    def normal(encode: Callable[[Array], Array], *shape: int) -> Array:
        count = min(math.prod(shape), DISTINCT_VALUES)
        return np.resize(encode(rng.standard_normal(count, dtype=np.float32)), shape)

    encode_kv = to_bf16 if layout["dtype"] == "bf16" else to_e4m3
    sharpness = np.float32(options.get("sharpness", 1))  # how far apart scores are: peaks then rise on the way
    return {
        "q": normal(lambda values: to_bf16(values * sharpness), tokens, integer(layout, "heads"), head_dim),
        "kv_pool": normal(encode_kv, pool_rows, head_dim),
        "draft_kv": None if in_pool else normal(encode_kv, tokens, head_dim),
        "kv_indices": index("kv_indices", np.concatenate(prefix_slots)),
        "kv_indptr": index("kv_indptr", np.cumsum([0, *prefixes])),
        "qo_indptr": index("qo_indptr", np.cumsum([0, *nodes])),
        "draft_slots": index("draft_slots", np.concatenate(draft_slots)) if in_pool else None,
        "tree_mask": None if options.get("mask") == "chain" else _random_masks(nodes, rng, options.get("blind", 0)),
    }


def attend(
    layout: Layout, case: Case, inputs: Mapping[str, Array | None], rows: Array | None = None
) -> dict[str, Array]:
    """Out and lse in float64, from the definition; with ``rows``, only those of [tokens x heads]."""
    latent, heads = integer(layout, "latent"), integer(layout, "heads")
    q, pool = present(inputs, "q"), present(inputs, "kv_pool")
    kv_indptr, qo_indptr = present(inputs, "kv_indptr"), present(inputs, "qo_indptr")
    q_rows = q.reshape(-1, q.shape[2])
    decode_kv = from_bf16 if layout["dtype"] == "bf16" else from_e4m3
    wanted = np.arange(len(q_rows)) if rows is None else rows
    out = np.zeros((wanted.size, latent))
    lse = np.full(wanted.size, -np.inf)
    for request in range(kv_indptr.size - 1):
        first, last = int(qo_indptr[request]), int(qo_indptr[request + 1])
        places = np.flatnonzero((wanted >= first * heads) & (wanted < last * heads))
        if places.size == 0:
            continue
        slots = present(inputs, "kv_indices")[int(kv_indptr[request]) : int(kv_indptr[request + 1])]
        draft = inputs["draft_kv"]
        drafts = pool[present(inputs, "draft_slots")[first:last]] if draft is None else draft[first:last]
        keys = decode_kv(np.concatenate([pool[slots], drafts])) * case.options.get("kv_scale", 1.0)
        nodes = wanted[places] // heads - first
        visible = _visible(inputs["tree_mask"], first, last, len(slots))[nodes]
        score = from_bf16(q_rows[wanted[places]]) @ keys.T * softmax_scale(layout)
        out[places], lse[places] = _softmax_product(np.where(visible, score, -np.inf), keys[:, :latent])
    if rows is not None:
        return {"out": out, "lse": lse}
    return {"out": out.reshape(-1, heads, latent), "lse": lse.reshape(-1, heads)}


def rows_within(layout: Layout, inputs: Mapping[str, Array | None], flop: float) -> Array:
    """Rows of [tokens x heads] whose `attend` takes about ``flop``, spread over requests, nodes and heads."""
    heads = integer(layout, "heads")
    starts = present(inputs, "qo_indptr").astype(np.int64) * heads
    lengths = np.diff(present(inputs, "kv_indptr")) + np.diff(starts) // heads
    key_flop = 2.0 * (2 * integer(layout, "latent") + integer(layout, "rope"))
    if key_flop * float(np.diff(starts) @ lengths) <= flop:
        return np.arange(starts[-1])
    asked = np.flatnonzero(np.diff(starts))
    count = int(flop / (key_flop * float(lengths[asked].max())))
    chosen = asked[_spread(len(asked), max(2, count // SAMPLED_ROWS))]
    rows = np.concatenate([np.arange(starts[request], starts[request + 1]) for request in chosen])
    ends = [edge for request in (asked[0], asked[-1]) for edge in (starts[request], starts[request + 1] - 1)]
    return np.union1d(ends, rows[_spread(len(rows), count)])


def present(inputs: Mapping[str, Array | None], name: str) -> Array:
    """An input that no case leaves out."""
    array = inputs[name]
    assert array is not None, name
    return array


def _scatter(lengths: list[int], page: int, rng: np.random.Generator) -> tuple[list[Array], int]:
    """Slots of each request in a pool with holes, page by page in random order; page 0 is reserved."""
    pages = [-(-length // page) for length in lengths]
    order = rng.permutation(np.arange(1, sum(pages) + sum(pages) // 4 + 2))
    slots, at = [], 0
    for length, count in zip(lengths, pages, strict=True):
        starts = order[at : at + count] * page
        slots.append((starts[:, None] + np.arange(page)).reshape(-1)[:length])
        at += count
    return slots, int(order.max() + 1) * page


def _random_masks(nodes: list[int], rng: np.random.Generator, blind: int) -> Array:
    """`_random_trees`; with ``blind``, every so many-th node sees none, and bits past a request's nodes are set."""
    masks = _random_trees(nodes, rng)
    if blind:
        bits = np.arange(masks.shape[1] * 32)
        masks[::blind] = 0
        masks |= np.concatenate([pack_mask(np.tile(bits >= count, (count, 1)), masks.shape[1]) for count in nodes])
    return masks


def _random_trees(nodes: list[int], rng: np.random.Generator) -> Array:
    """Ancestor bits of one random tree a request: uint32 [tokens, words], bit j of row i is set if i sees j."""
    words = max(1, -(-max(nodes) // 32))
    rows: list[Array] = []
    for count in nodes:
        visible = np.eye(count, dtype=bool)
        for node in range(1, count):
            visible[node] |= visible[rng.integers(0, node)]
        rows.append(pack_mask(visible, words))
    return np.concatenate(rows) if rows else np.zeros((0, words), np.uint32)


def pack_mask(visible: Array, words: int) -> Array:
    """Boolean [nodes, nodes] to uint32 [nodes, words], bit j of a row first in word j // 32."""
    padded = np.zeros((len(visible), words * 32), dtype=bool)
    padded[:, : visible.shape[1]] = visible
    return np.packbits(padded, axis=1, bitorder="little").view(np.uint32).reshape(len(visible), words)


def _visible(mask: Array | None, first: int, last: int, prefix: int) -> Array:
    """Boolean [nodes, prefix + nodes] of one request."""
    count = last - first
    if mask is None:
        tree = np.tri(count, dtype=bool)
    else:
        tree = np.unpackbits(mask[first:last].view(np.uint8), axis=1, bitorder="little")[:, :count].astype(bool)
    return np.concatenate([np.ones((count, prefix), dtype=bool), tree], axis=1)


def _spread(length: int, count: int) -> Array:
    """At most ``count`` indices below ``length``, evenly apart, from the first to the last."""
    return np.unique(np.linspace(0, length - 1, min(length, count)).round().astype(np.int64))


def _softmax_product(score: Array, values: Array) -> tuple[Array, Array]:
    """softmax(score) @ values and the log-sum-exp of score, by row; a row that sees nothing gives 0 and -inf."""
    peak = score.max(axis=1, initial=-np.inf)
    base = np.where(np.isfinite(peak), peak, 0.0)
    weight = np.exp(score - base[:, None])
    total = weight.sum(axis=1)
    with np.errstate(divide="ignore"):
        lse = np.log(total) + base
    return weight @ values / np.where(total > 0, total, 1.0)[:, None], lse
