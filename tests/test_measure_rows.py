"""The rows that vouch for a large workload point: which are chosen, and that their reference is the whole one's."""

from __future__ import annotations

import numpy as np
import pytest

from kgen.families.verify_mla import VerifyMla
from kgen.families.verify_mla_problem import SAMPLED_ROWS
from kgen.family import Case, Layout

FAMILY = VerifyMla()
LAYOUT: Layout = {"heads": 4, "latent": 64, "rope": 16, "page_size": 1, "scale_dim": 48, "dtype": "bf16"}
ROW_FLOP = 2 * 40 * (64 + 80)  # of the longest request below: 37 prefix rows and 3 nodes


def case(**options: object) -> Case:
    lengths = {"prefixes": [12, 0, 9, 37], "nodes": [5, 0, 1, 3]}
    return Case("ragged", {"lse": True} | lengths | options)


@pytest.mark.parametrize("options", [{}, {"mask": "chain"}, {"draft": "pool", "wide": ("qo_indptr",)}])
def test_reference_of_rows_is_that_part_of_the_whole(options: dict[str, object]) -> None:
    asked = case(**options)
    inputs = FAMILY.make_inputs(LAYOUT, asked, seed=3)
    whole = FAMILY.reference(LAYOUT, asked, inputs)
    assert (whole["out"].shape, whole["lse"].shape) == ((9, 4, 64), (9, 4))
    rows = np.array([0, 6, 19, 20, 23, 24, 35])
    some = FAMILY.reference(LAYOUT, asked, inputs, rows)
    assert (some["out"].shape, some["lse"].shape) == ((7, 64), (7,))
    np.testing.assert_allclose(some["out"], whole["out"].reshape(-1, 64)[rows], rtol=1e-13, atol=1e-15)
    np.testing.assert_allclose(some["lse"], whole["lse"].reshape(-1)[rows], rtol=1e-13)
    assert not np.allclose(some["out"], whole["out"].reshape(-1, 64)[rows[::-1]]), "rows are told apart"


def sampled(asked: Case, flop: float) -> list[int]:
    rows = FAMILY.sample_rows(LAYOUT, asked, FAMILY.make_inputs(LAYOUT, asked, seed=0), flop)
    assert rows.dtype == np.int64
    return [int(row) for row in rows]


def test_all_rows_are_taken_while_they_fit() -> None:
    whole = 2 * (64 + 80) * 4 * (5 * 17 + 1 * 10 + 3 * 40)
    assert sampled(case(), whole) == list(range(36))
    assert len(sampled(case(), whole - 1)) < 36


def test_first_and_last_nodes_are_always_taken() -> None:
    ends = [0, 19, 24, 35]  # of the first and the last request; 1 has no node, and 2 only one
    assert sampled(case(), 0) == ends
    taken = sampled(case(), 12 * ROW_FLOP)
    assert set(ends) < set(taken)
    assert len(taken) <= 12 + len(ends)
    assert {row % 4 for row in taken} == {0, 1, 2, 3}, "no head is left out"


def test_few_requests_are_read_where_each_is_long() -> None:
    many = case(prefixes=[37] * 40, nodes=[3] * 40)
    taken = sampled(many, 40 * ROW_FLOP)
    requests = sorted({row // 12 for row in taken})
    assert len(requests) == 40 // SAMPLED_ROWS
    assert (requests[0], requests[-1]) == (0, 39)
    assert 40 <= len(taken) <= 44
