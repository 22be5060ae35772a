"""Calls that share a schedule: one makes it, the others keep it, and only where it is theirs to keep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from mla_packs import shipped_spec, sources_only_pack, tensors_of

from kgen.errors import InputError, KgenError, TensorError
from kgen.family import Case
from kgen.runtime import PreparedCall, prepare
from kgen.runtime.pack_reader import Pack
from kgen.validate import compare

CAPACITY = {"batch": 40, "nodes": 65, "prefix": 1040}
SPEC = shipped_spec()
LAYOUT = SPEC.layout("h8_p1")
CASES = {case.name: case for case in SPEC.family.cases(LAYOUT)}
FLASH, COMBINE, SCHEDULE = "verify_mla_flash", "verify_mla_combine", "verify_mla_schedule"


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared with the other test processes, which then do not compile the same again."""
    return tmp_path_factory.getbasetemp().parent / "emulator"


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    return sources_only_pack(SPEC, tmp_path_factory.mktemp("db"))


@pytest.fixture(scope="module")
def call(pack: Pack, cache_dir: Path) -> PreparedCall:
    """In checked mode."""
    return prepared(pack, cache_dir, checked=True)


def prepared(pack: Pack, cache_dir: Path, *, checked: bool) -> PreparedCall:
    return prepare(
        pack, family="verify_mla", layout="h8_p1", capacity=CAPACITY, device="cpu", checked=checked, cache_dir=cache_dir
    )


def check(call: PreparedCall, case: Case, seed: int = 3, **options: Any) -> None:
    """Run a case and compare every output with the float64 reference; seeds differ in all but lengths."""
    inputs = SPEC.family.make_inputs(LAYOUT, case, seed)
    outputs = SPEC.family.output_arrays(LAYOUT, case, inputs)
    call(**tensors_of(inputs | outputs), **options)
    reference = SPEC.family.reference(LAYOUT, case, inputs)
    for name, array in outputs.items():
        if array is not None:
            found = SPEC.family.as_float(name, array)
            result = compare(found, reference[name], SPEC.tolerances[name], name=case.name, seed=seed, output=name)
            assert result.ok, result.reason


@pytest.mark.parametrize("hint", [1, 256])
@pytest.mark.parametrize("name", ["ragged", "pool_draft", "many_requests", "chain", "padded_request"])
def test_layers_are_right_with_what_the_first_made(call: PreparedCall, name: str, hint: int) -> None:
    for layer in range(3):
        check(call, CASES[name], layer, schedule="keep" if layer else "make", hint={"prefix": hint})


def case_of(prefixes: list[int], nodes: list[int]) -> Case:
    return Case("two", {"prefixes": prefixes, "nodes": nodes, "lse": True})


def test_a_new_forward_makes_a_new_one_and_a_call_between_leaves_it(call: PreparedCall) -> None:
    for prefixes, nodes in (([900, 3], [2, 5]), ([3, 900], [5, 2]), ([0, 40], [1, 6])):
        check(call, case_of(prefixes, nodes), schedule="make", hint={"prefix": 256})
        check(call, CASES["many_nodes"], hint={"prefix": 256})
        check(call, case_of(prefixes, nodes), 4, schedule="keep", hint={"prefix": 256})


def schedule_memory(call: PreparedCall) -> torch.Tensor:
    (region,) = call._shared.regions
    memory: torch.Tensor
    (memory,) = [memory for memory in call._memory if memory.data_ptr() == region.address]
    return memory


def test_what_is_kept_is_what_is_used(call: PreparedCall) -> None:
    check(call, CASES["ragged"], schedule="make")
    schedule_memory(call).zero_()  # no block has anything to do
    check(call, CASES["ragged"])
    with pytest.raises(AssertionError, match="are NaN or never written"):
        check(call, CASES["ragged"], schedule="keep")
    check(call, CASES["ragged"], schedule="make")


def test_one_more_launch_makes_it_and_nobody_else_may_touch_it(
    call: PreparedCall, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries: list[list[str]] = []
    touched: list[bool] = []
    run = call._backend.run

    def spy(source: str, launches: Sequence[Any], regions: Sequence[Any]) -> None:
        entries.append([launch.entry for launch in launches])
        touched.append("schedule" in [region.name for region in regions])
        run(source, launches, regions)

    monkeypatch.setattr(call._backend, "run", spy)
    for schedule in ("make", "keep", None):
        check(call, CASES["many_splits"], schedule=schedule)
    assert entries == [[SCHEDULE, FLASH, COMBINE], [FLASH, COMBINE], [FLASH, COMBINE]]
    assert touched == [True, True, False]


def refused(call: PreparedCall, kind: type[KgenError], says: str, case: Case, **options: Any) -> None:
    """The call is refused before anything is launched."""
    ran: list[str] = []
    run = call._backend.run
    call._backend.run = lambda source, *_: ran.append(source)  # type: ignore[method-assign]
    try:
        with pytest.raises(kind, match=says):
            check(call, case, **options)
    finally:
        call._backend.run = run  # type: ignore[method-assign]
    assert ran == []


TWO = case_of([700, 9], [2, 3])


def nothing_made(call: PreparedCall) -> None:
    call._shared.made = None


def empty_made(call: PreparedCall) -> None:
    check(call, TWO, schedule="make")
    inputs = SPEC.family.make_inputs(LAYOUT, case_of([3, 0], [0, 0]), 0)
    outputs = SPEC.family.output_arrays(LAYOUT, case_of([3, 0], [0, 0]), inputs)
    call(**tensors_of(inputs | outputs), schedule="make")


def failed(call: PreparedCall) -> None:
    check(call, TWO, schedule="make")
    inputs = SPEC.family.make_inputs(LAYOUT, TWO, 0)
    tensors = tensors_of(inputs | SPEC.family.output_arrays(LAYOUT, TWO, inputs))
    run = call._backend.run
    call._backend.run = lambda *_: 1 / 0  # type: ignore[assignment]
    with pytest.raises(ZeroDivisionError):
        call(**tensors, schedule="make")
    call._backend.run = run  # type: ignore[method-assign]


@pytest.mark.parametrize("before", [nothing_made, empty_made, failed])
def test_nothing_is_kept_where_nothing_was_made(call: PreparedCall, before: Callable[[PreparedCall], None]) -> None:
    before(call)
    refused(call, InputError, "^schedule: cannot be kept, no call has made one; make it in", TWO, schedule="keep")


@pytest.mark.parametrize(
    ("case", "options", "kind", "says"),
    [
        (case_of([700, 9], [2, 4]), {}, InputError, r"^schedule: .* for other sizes, tokens 6, then 5; make it in"),
        (case_of([700, 9, 1], [2, 2, 1]), {}, InputError, r"for other sizes, batch \+ 1 4, then 3; batch 3, then 2"),
        (TWO, {"nodes": 5}, InputError, "for other sizes, nodes 5, then 32"),
        (TWO, {"hint": {"prefix": 256}}, InputError, "^schedule: .* for another variant, flash_m16_.*, then "),
        (case_of([9, 700], [2, 3]), {}, TensorError, r"^kv_indptr: .*kept .*\[0, 9, 709\], then \[0, 700, 709\]"),
        (case_of([700, 9], [3, 2]), {}, TensorError, r"^qo_indptr: has changed since .*\[0, 3, 5\], then \[0, 2, 5\]"),
    ],
)
def test_a_schedule_of_another_call_is_not_kept(
    call: PreparedCall, case: Case, options: dict[str, Any], kind: type[KgenError], says: str
) -> None:
    check(call, TWO, schedule="make", hint={"prefix": 1})
    refused(call, kind, says, case, schedule="keep", **({"hint": {"prefix": 1}} | options))
    check(call, TWO, schedule="keep", hint={"prefix": 1})


def test_a_make_that_was_captured_and_never_ran_leaves_nothing_to_do(
    pack: Pack, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, case = prepared(pack, cache_dir, checked=False), CASES["many_splits"]
    inputs = SPEC.family.make_inputs(LAYOUT, case, 0)
    outputs = SPEC.family.output_arrays(LAYOUT, case, inputs)
    tensors = tensors_of(inputs | outputs)
    with monkeypatch.context() as captured:
        captured.setattr(call._backend, "run", lambda source, launches, regions: None)
        call(**tensors, schedule="make")
    call(**tensors, schedule="keep")
    assert torch.isnan(tensors["out"]).all()


def test_another_word_is_refused(call: PreparedCall) -> None:
    refused(call, InputError, "^schedule: must be make, keep or None, 'kept'$", TWO, schedule="kept")


def test_unchecked_calls_look_at_no_lengths_and_allocate_nothing(
    pack: Pack, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = prepared(pack, cache_dir, checked=False)
    monkeypatch.setattr(torch.Tensor, "tolist", lambda *_: pytest.fail("waited for"))
    monkeypatch.setattr(torch, "empty", lambda *_, **__: pytest.fail("allocated"))
    for layer in range(2):
        check(call, TWO, layer, schedule="keep" if layer else "make")
    refused(call, InputError, "for other sizes", CASES["ragged"], schedule="keep")
