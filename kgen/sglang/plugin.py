"""The plug-in: what SGLang's processes call before they read their arguments."""

from __future__ import annotations

import importlib
import logging
import os
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from kgen.errors import KgenError
from kgen.resources import GENERATED
from kgen.runtime import Pack, load_pack
from kgen.runtime.dispatch import runs_on

if TYPE_CHECKING:
    from kgen.sglang.tally import Tally

BACKEND = "kgen"
"""The name for ``--attention-backend``."""

TESTED_SGLANG = "0.5.23"
NEEDED = {
    "sglang.srt.plugins.hook_registry": ("HookRegistry", "HookType"),
    "sglang.srt.layers.attention.attention_registry": ("register_attention_backend",),
    "sglang.srt.layers.attention.verify_mask": ("VerifyMask",),
    "sglang.srt.layers.attention.triton_backend": (
        "TritonAttnBackend.init_forward_metadata_out_graph",
        "TritonAttnBackend.init_forward_metadata_in_graph",
        "TritonAttnBackend._update_target_verify_buffers",
        "TritonAttnBackend._target_verify_num_tokens_per_req",
        "TritonAttnBackend._set_kv_buffer",
    ),
    "sglang.srt.runtime_context": ("get_context", "get_exec", "get_observability"),
    "sglang.srt.layers.radix_attention": ("AttentionType",),
    "sglang.srt.distributed": ("get_tp_group",),
    "sglang.srt.arg_groups.choices": ("add_attention_backend_choices",),
    "sglang.srt.speculative.eagle_utils": ("TreeMaskMode",),
    "sglang.srt.mem_cache.memory_pool": ("KVWriteLoc.for_batch", "MLATokenToKVPool.move_kv_cache"),
}
"""What is used of SGLang; a release that lacks any of it is too old, or too new, for this plug-in."""

MOVE = "sglang.srt.mem_cache.memory_pool.MLATokenToKVPool.move_kv_cache"

logger = logging.getLogger("kgen.sglang")


def register() -> None:
    """Make the backend known to SGLang, or stay out and say why in one line; never raises a KgenError."""
    try:
        pack = checked_pack("verify_mla")
        problem = missing_from_sglang() or missing_from_machine(pack)
    except KgenError as error:
        problem = str(error)
    if problem:
        logger.warning("kgen stays out: %s", problem)
        return
    enable(pack, packed_moves())


def pack_folder(family: str) -> str:
    """Where the pack of a family is: $KGEN_PACK_<FAMILY>, else the one that ships with kgen."""
    return os.environ.get(f"KGEN_PACK_{family.upper()}") or str(GENERATED / "pack" / family)


def checked_pack(family: str) -> Pack:
    """The pack of a family, every byte checked. Raises PackError, also where it holds another family."""
    folder = pack_folder(family)
    pack = load_pack(folder)
    if pack.manifest.family != family:
        raise KgenError(folder, f"is no pack of {family}", seen=f"it holds {pack.manifest.family}")
    return pack


def packed_moves() -> Pack | None:
    """The pack for moves of KV rows; without one SGLang's own moves stay, which one line says."""
    try:
        return checked_pack("kv_defrag")
    except KgenError as error:
        logger.warning("kgen leaves KV moves to SGLang: %s", error)
        return None


def missing_from_sglang() -> str:
    """What this SGLang lacks of `NEEDED`, or nothing."""
    for name, wanted in NEEDED.items():
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            return f"{_sglang_version()} has no {name} ({error}); kgen is tested with {TESTED_SGLANG}"
        for item in wanted:
            try:
                attrgetter(item)(module)
            except AttributeError:
                return f"{_sglang_version()} has no {name}.{item}; kgen is tested with {TESTED_SGLANG}"
    return ""


def missing_from_machine(pack: Pack) -> str:
    """Why no GPU here runs the pack, or nothing. Raises ForeignArchError.

    The one that serves is not known yet (``--base-gpu-id``); a backend on another looks again.
    """
    import torch

    if not torch.cuda.is_available():
        return "no CUDA GPU is usable"
    capabilities = [torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())]
    archs = [pack.manifest.targets[name].arch for name in pack.manifest.dispatch]
    if not any(runs_on(arch, capability) for arch in archs for capability in capabilities):
        pack.dispatcher().target(capabilities[0])  # raises, and lists what the pack has
    return ""


def _sglang_version() -> str:
    try:
        return f"sglang {importlib.import_module('sglang').__version__}"
    except (ImportError, AttributeError):
        return "sglang"


def enable(pack: Pack, moves: Pack | None) -> Tally:
    """Register backend, command-line choice and, with a pack for them, KV moves; the tally counts what they do."""
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from kgen.sglang.kv_moves import KvMoves
    from kgen.sglang.tally import Tally

    tally = Tally()
    mover = KvMoves(moves, tally) if moves is not None else None

    def create(runner: Any) -> Any:
        from kgen.sglang.backend import KgenAttnBackend

        backend = KgenAttnBackend(runner, pack, tally)
        if mover is not None and backend.num_draft_tokens:
            nodes = backend.num_draft_tokens
            # EAGLE moves its longest path for each request, other drafts the length of a tree.
            kept = min(nodes, backend.speculative_num_steps + 1) if runner.spec_algorithm.is_eagle() else nodes
            mover.expect(runner.token_to_kv_pool, runner.req_to_token_pool.size * kept)
        return backend

    register_attention_backend(BACKEND)(create)
    if BACKEND not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([BACKEND])
    _verify_chains_without_a_mask()
    if mover is not None:
        HookRegistry.register(MOVE, mover, HookType.AROUND)
    return tally


def _verify_chains_without_a_mask() -> None:
    """Tell DFLASH, which asks by class name, that this backend needs no mask for a chain."""
    try:
        dflash = importlib.import_module("sglang.srt.speculative.dflash_utils")
        known = dflash._DFLASH_VERIFY_SKIP_CUSTOM_MASK_BACKENDS  # noqa: SLF001 - there is no public way
    except (ImportError, AttributeError):
        return  # it then builds a mask, which is right too
    dflash._DFLASH_VERIFY_SKIP_CUSTOM_MASK_BACKENDS = known | {"KgenAttnBackend"}  # type: ignore[attr-defined]  # noqa: SLF001
