"""Writes the golden vectors beside this file: small verify_mla problems and what the float64 reference says of them.

    python tests/vectors/make_vectors.py

Each .npz holds the inputs by parameter name (bf16 as uint16; an input that the case leaves out is absent), the
expected outputs rounded to float32 as ``expected_out`` and ``expected_lse``, and the layout as JSON.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from kgen.family import Case, Layout, find_family

FOLDER = Path(__file__).parent
LAYOUT: Layout = {"heads": 8, "latent": 512, "rope": 64, "dtype": "bf16", "page_size": 1, "scale_dim": 192}
CASES = (
    Case("tree", {"prefixes": [33, 0], "nodes": [3, 2], "lse": True}),
    Case("pool_draft", {"prefixes": [18], "nodes": [4], "draft": "pool", "wide": ["kv_indices"], "lse": True}),
    Case("chain", {"prefixes": [0, 31], "nodes": [3, 1], "mask": "chain", "lse": True}),
)


def main() -> None:
    """Write one file a case."""
    family = find_family("verify_mla", "make_vectors")
    for seed, case in enumerate(CASES):
        inputs = family.make_inputs(LAYOUT, case, seed)
        expected = family.reference(LAYOUT, case, inputs)
        arrays: dict[str, Any] = {name: array for name, array in inputs.items() if array is not None}
        arrays |= {f"expected_{name}": array.astype(np.float32) for name, array in expected.items()}
        arrays["layout"] = np.frombuffer(json.dumps(LAYOUT).encode(), np.uint8)
        arrays["options"] = np.frombuffer(json.dumps(dict(case.options)).encode(), np.uint8)
        np.savez_compressed(FOLDER / f"{case.name}.npz", **arrays)


if __name__ == "__main__":
    main()
