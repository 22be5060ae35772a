"""What a serving process uses: load a frozen pack, prepare a family for a layout and a device, call it on tensors.

Reading and dispatching need the standard library only; preparing and calling need numpy and torch.
"""

from __future__ import annotations

from kgen.resources import GENERATED
from kgen.runtime.dispatch import Dispatcher, Explanation, Match, Table
from kgen.runtime.launch import PreparedCall, prepare
from kgen.runtime.pack_reader import Pack, load_pack
from kgen.runtime.pointer_table import PointerTable
from kgen.runtime.tree_mask import mask_words, pack_tree_mask

__all__ = [
    "Dispatcher",
    "Explanation",
    "Match",
    "Pack",
    "PointerTable",
    "PreparedCall",
    "Table",
    "default_pack",
    "load_pack",
    "mask_words",
    "pack_tree_mask",
    "prepare",
]


def default_pack(family: str) -> Pack:
    """The pack of a family that is shipped with kgen. Raises PackError where there is none."""
    return load_pack(GENERATED / "pack" / family)
