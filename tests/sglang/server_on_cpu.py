"""`python -m sglang.launch_server` on a CPU: its processes, HTTP, a DeepSeek model, drafts from n-grams, kgen emulated.

SGLang starts its other processes anew, which run this file up to its last lines. A machine without a GPU lacks what
SGLang's kernel wheels bring: three functions for trees of drafts are SGLang's own Triton versions of them instead,
which it takes on Intel GPUs.
"""

from __future__ import annotations

import sglang_harness  # noqa: F401 - first: it prepares triton

import sys
from types import ModuleType
from unittest.mock import patch

from sglang_stand_ins import stand_in

stand_in(["sgl_kernel", "soundfile"])
for name in ("vllm", "vllm._custom_ops"):  # a kernel that the model names, and does not take on a CPU
    sys.modules[name] = ModuleType(name)
sys.modules["vllm._custom_ops"].rotary_embedding = None  # type: ignore[attr-defined]

from sglang.srt.plugins import load_plugins

with (
    patch("torch.cuda.is_available", lambda: True),
    patch("torch.cuda.device_count", lambda: 1),
    patch("torch.cuda.get_device_capability", lambda _: (12, 0)),
):
    load_plugins()

from sglang.kernels.ops.speculative import cache_locs, reconstruct_tree, spec_tree

for module in (cache_locs, reconstruct_tree, spec_tree):
    module._is_xpu = True

if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    run_server(prepare_server_args(sys.argv[1:]))
