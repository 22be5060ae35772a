"""SGLang's ``MLATokenToKVPool.move_kv_cache`` in one launch for all layers, instead of two a layer."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from kgen.errors import KgenError
from kgen.runtime import Pack, PointerTable, PreparedCall, prepare
from kgen.sglang.tally import KV_MOVE, Tally

USUAL_ROWS = 512
"""Rows that one call moves, where nothing is known of the server."""

MOST_ROWS = 2048
"""The largest capacity, whatever the server's: each row of workspace is as large as a token's rows in all layers."""


class PoolMover:
    """The prepared call for the layers of one pool. Raises KgenError where the pack has nothing for its rows."""

    def __init__(self, pack: Pack, layers: list[Any], rows: int) -> None:
        self.table = PointerTable(layers)
        self.call: PreparedCall = prepare(
            pack,
            family="kv_defrag",
            layout={"row_bytes": self.table.row_bytes, "moves": "any"},
            capacity={"layers": self.table.entries, "rows": rows},
            device=self.table.device,
        )

    def serves(self, layers: list[Any]) -> bool:
        """Whether these are the tensors that the table was made of."""
        same = zip(self.table.tensors, layers, strict=False)
        return len(layers) == self.table.entries and all(mine is other for mine, other in same)


class KvMoves:
    """The hook around ``move_kv_cache``. Each pool's call is prepared when it first moves something.

    ``rows`` is how many one call moves: all nodes of all requests, of which few are accepted. More go to SGLang.
    """

    def __init__(self, pack: Pack, tally: Tally) -> None:
        self._pack, self._tally, self.rows, self._expected = pack, tally, USUAL_ROWS, 0
        self._movers: WeakKeyDictionary[Any, PoolMover | str] = WeakKeyDictionary()

    def expect(self, requests: int, nodes: int) -> None:
        """Be ready for a server that verifies trees of so many nodes for so many requests; before the first move."""
        self._expected = max(self._expected, min(requests * nodes, MOST_ROWS))
        self.rows = self._expected

    def __call__(self, original: Any, pool: Any, tgt_loc: Any, src_loc: Any) -> Any:
        """Move as ``original(pool, tgt_loc, src_loc)`` would: each target gets what its source held before."""
        if tgt_loc.numel() == 0:
            return None
        mover = self._mover(pool, tgt_loc)
        if isinstance(mover, str):
            self._tally.left_to_sglang(KV_MOVE, mover)
            return original(pool, tgt_loc, src_loc)
        try:
            mover.call(layer_ptrs=mover.table, src_slots=src_loc.reshape(-1), dst_slots=tgt_loc.reshape(-1))
        except KgenError as error:  # found before anything is launched
            self._tally.left_to_sglang(KV_MOVE, f"{error.where} {error.wrong}")
            return original(pool, tgt_loc, src_loc)
        self._tally.did(KV_MOVE)
        return None

    def _mover(self, pool: Any, tgt_loc: Any) -> PoolMover | str:
        """The mover of a pool, or why there is none for this call."""
        if tgt_loc.numel() > self.rows:
            return f"more than {self.rows} rows"
        known = self._movers.get(pool)
        if isinstance(known, str) or (known is not None and known.serves(pool.kv_buffer)):
            return known
        if _is_capturing(tgt_loc):
            return "the first move of a pool is inside a graph capture"
        import torch

        try:
            self._movers[pool] = PoolMover(self._pack, pool.kv_buffer, self.rows)
        except KgenError as error:
            self._movers[pool] = str(error)
        except torch.OutOfMemoryError:
            self._movers[pool] = "no memory for the workspace"
        return self._movers[pool]


def _is_capturing(tensor: Any) -> bool:
    import torch

    return bool(tensor.is_cuda and torch.cuda.is_current_stream_capturing())
