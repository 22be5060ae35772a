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
        self.table, self.rows = PointerTable(layers), rows
        self.call: PreparedCall = prepare(
            pack,
            family="kv_defrag",
            layout={"row_bytes": self.table.row_bytes, "moves": "any"},
            capacity={"layers": self.table.entries, "rows": rows},
            device=self.table.device,
        )

    def serves(self, layers: list[Any], rows: int) -> bool:
        """Whether these are the tensors that the table was made of, and so many rows fit."""
        same = zip(self.table.tensors, layers, strict=False)
        return rows <= self.rows and len(layers) == self.table.entries and all(mine is other for mine, other in same)


class KvMoves:
    """The hook around ``move_kv_cache``; ``rows`` is how many one call moves, more go to SGLang.

    The call for a server's pool is prepared when its backend is made, before graphs are captured; that for any other
    pool when it first moves something.
    """

    def __init__(self, pack: Pack, tally: Tally) -> None:
        self._pack, self._tally, self.rows, self._expected = pack, tally, USUAL_ROWS, 0
        self._movers: WeakKeyDictionary[Any, PoolMover | str] = WeakKeyDictionary()

    def expect(self, pool: Any, rows: int) -> None:
        """Be ready for moves of so many rows, in ``pool`` at once if it is one whose moves this is the hook for."""
        from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

        self._expected = max(self._expected, min(rows, MOST_ROWS))
        self.rows = self._expected
        if isinstance(pool, MLATokenToKVPool):
            self._mover(pool, self.rows)

    def __call__(self, original: Any, pool: Any, tgt_loc: Any, src_loc: Any) -> Any:
        """Move as ``original(pool, tgt_loc, src_loc)`` would: each target gets what its source held before."""
        if tgt_loc.numel() == 0:
            return None
        mover = self._mover(pool, tgt_loc.numel())
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

    def _mover(self, pool: Any, rows: int) -> PoolMover | str:
        """The mover of a pool, or why there is none for this call."""
        if rows > self.rows:
            return f"more than {self.rows} rows"
        known = self._movers.get(pool)
        if isinstance(known, str) or (known is not None and known.serves(pool.kv_buffer, rows)):
            return known
        if _is_capturing(pool.kv_buffer):
            return "the first move of a pool is inside a graph capture"
        import torch

        try:
            self._movers[pool] = PoolMover(self._pack, pool.kv_buffer, self.rows)
        except KgenError as error:
            self._movers[pool] = str(error)
        except torch.OutOfMemoryError:
            self._movers[pool] = "no memory for the workspace"
        return self._movers[pool]


def _is_capturing(layers: list[Any]) -> bool:
    import torch

    return bool(layers and layers[0].is_cuda and torch.cuda.is_current_stream_capturing())
