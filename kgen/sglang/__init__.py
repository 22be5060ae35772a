"""kgen inside SGLang: an attention backend whose tree verify runs on a pack's kernels, and faster moves of KV rows.

SGLang calls `register` through the entry point group ``sglang.srt.plugins`` in each of its processes. Importing this
package needs neither SGLang nor torch; docs/sglang.md is for operators.
"""

from __future__ import annotations

from kgen.sglang.plugin import BACKEND, register

__all__ = ["BACKEND", "register"]
