"""The space holds exactly the candidates that meet every constraint, and the prefix tree leads only to those."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from kgen.errors import InputError
from kgen.family import Value
from kgen.resources import SPECS
from kgen.space import InfeasibleError, candidate_key, check_candidate, enumerate_space
from kgen.spec import Spec, load_spec
from kgen.targets import Target


@pytest.fixture(scope="module")
def shipped() -> Spec:
    return load_spec(SPECS / "verify_mla.yaml")


@pytest.fixture(scope="module")
def spec(shipped: Spec) -> Spec:
    """A space that is small enough to enumerate in every test."""
    small: dict[str, tuple[Value, ...]] = {
        "tile_m": (32, 64),
        "tile_n": (16, 32),
        "k_split": (4, 5),
        "gather": ("bulk",),
        "item_overhead_rows": (128,),
    }
    return replace(shipped, tunables={**shipped.tunables, **small})


@pytest.fixture(scope="module")
def target(shipped: Spec) -> Target:
    return shipped.targets["sm_120"]


def test_candidates_are_exactly_the_combinations_that_meet_the_constraints(spec: Spec, target: Target) -> None:
    space = enumerate_space(spec, "h8_p1", target)
    layout = spec.layouts["h8_p1"]
    combinations = [dict(zip(spec.tunables, values, strict=True)) for values in product(*spec.tunables.values())]
    feasible = [
        candidate
        for candidate in combinations
        if all(rule.holds(candidate, layout, target) for rule in spec.family.constraints)
    ]
    assert list(space.candidates) == feasible
    assert space.total == len(combinations)
    assert sum(space.rejected.values()) == space.total - len(feasible)
    assert set(space.rejected) <= {rule.name for rule in spec.family.constraints}
    assert space.candidates == enumerate_space(spec, "h8_p1", target).candidates


@pytest.mark.parametrize("target_name", ["sm_120", "sm_121", "sm_90"])
def test_the_shipped_default_is_in_a_space_of_many(shipped: Spec, target_name: str) -> None:
    space = enumerate_space(shipped, "h128_p64", shipped.targets[target_name])
    assert shipped.default in space
    assert len(space.candidates) >= 150


def test_shared_memory_bounds_the_space(spec: Spec, target: Target) -> None:
    tight = replace(target, shared_bytes_per_block=60_000)
    all_candidates = enumerate_space(spec, "h8_p1", target).candidates
    fewer = enumerate_space(spec, "h8_p1", tight).candidates
    assert 0 < len(fewer) < len(all_candidates)
    for candidate in fewer:
        assert spec.family.kernels(candidate, spec.layouts["h8_p1"])[0].shared_bytes <= 60_000


def test_the_prefix_tree_is_the_brute_force(spec: Spec, target: Target) -> None:
    space = enumerate_space(spec, "h8_p1", target)
    names = list(spec.tunables)
    rng = random.Random(0)
    for _ in range(50):
        partial: dict[str, Value] = {}
        for name in names:
            expected = [
                value
                for value in spec.tunables[name]
                if any(candidate.items() >= {**partial, name: value}.items() for candidate in space.candidates)
            ]
            assert list(space.choices(partial)) == expected
            partial[name] = rng.choice(expected)
        assert partial in space
        assert space.choices(partial) == ()


def test_a_wrong_partial_assignment_is_named(spec: Spec, target: Target) -> None:
    space = enumerate_space(spec, "h8_p1", target)
    with pytest.raises(InputError, match=r"^choices: tunables are decided in order, no algorithm yet$"):
        space.choices({"tile_m": 64})
    with pytest.raises(InputError, match=r"^choices: no candidate has these values, tile_m=7 after "):
        space.choices({"algorithm": "flash", "tile_m": 7})


def test_membership_needs_every_tunable_and_no_other(spec: Spec, target: Target) -> None:
    space = enumerate_space(spec, "h8_p1", target)
    candidate = dict(space.candidates[0])
    assert candidate in space
    assert {**candidate, "more": 1} not in space
    assert {**candidate, "stages": 99} not in space
    del candidate["stages"]
    assert candidate not in space


def test_no_candidate_at_all_says_what_rejected_them(spec: Spec, target: Target) -> None:
    tiny = replace(target, shared_bytes_per_block=1000, registers_per_thread=16)
    with pytest.raises(InputError) as caught:
        enumerate_space(replace(spec, path=Path("x.yaml")), "h8_p1", tiny)
    counts = Counter(
        spec.family.violation(dict(zip(spec.tunables, values, strict=True)), spec.layouts["h8_p1"], tiny)
        for values in product(*spec.tunables.values())
    )
    assert None not in counts
    listed = ", ".join(f"{count} {rule!r}" for rule, count in counts.most_common())
    assert "'shared memory fits'" in listed
    assert str(caught.value) == (
        f"x.yaml: no candidate of layout h8_p1 fits sm_120 (0 of {counts.total()}), rejected by: {listed}; "
        "widen the tunables"
    )


def test_an_unknown_layout_is_named(spec: Spec, target: Target) -> None:
    with pytest.raises(InputError, match=r"^--layout: .* no such layout, 'h8_p2'; did you mean 'h8_p1'"):
        enumerate_space(spec, "h8_p2", target)


def test_a_key_does_not_depend_on_the_order() -> None:
    assert candidate_key({"b": 1, "a": "x"}) == candidate_key({"a": "x", "b": 1}) == "a=x,b=1"


def test_keys_tell_candidates_apart(spec: Spec, target: Target) -> None:
    candidates = enumerate_space(spec, "h8_p1", target).candidates
    assert len({candidate_key(candidate) for candidate in candidates}) == len(candidates)


def test_default_and_oracle_pass_the_check(spec: Spec, target: Target) -> None:
    check_candidate(spec, spec.default, "h8_p1", target)
    check_candidate(spec, spec.oracle, "h8_p1", target)


def test_an_infeasible_candidate_is_named(spec: Spec, target: Target) -> None:
    candidate = {**spec.default, "stages": 5}
    with pytest.raises(InfeasibleError, match="breaks the rule 'shared memory fits', layout h8_p1 on sm_120") as caught:
        check_candidate(spec, candidate, "h8_p1", target)
    assert caught.value.rule == "shared memory fits"
    check_candidate(spec, candidate, "h8_p1", replace(target, shared_bytes_per_block=10**6, shared_bytes_per_sm=10**6))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tile": 64}, r": no such tunable, 'tile'; did you mean 'tile_\w'"),
        ({"tile_m": 65}, r": tile_m has no such value, 65; use one of: 32, 64$"),
        ({"algorithm": "oracle"}, r": algorithm has no such value, 'oracle'; use one of: flash$"),
    ],
)
def test_a_candidate_that_is_not_of_the_space_is_named(
    spec: Spec, target: Target, change: dict[str, int | str], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        check_candidate(spec, {**spec.default, **change}, "h8_p1", target)


def test_a_candidate_that_lacks_tunables_is_named(spec: Spec, target: Target) -> None:
    with pytest.raises(InputError, match=r"^candidate algorithm=flash: tunables are missing, tile_m, tile_n, "):
        check_candidate(spec, {"algorithm": "flash"}, "h8_p1", target)
