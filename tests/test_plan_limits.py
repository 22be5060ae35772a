"""Every launch that a family plans is one that its kernels were compiled for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest

from kgen.family import Kernel, Plan, families
from kgen.resources import SPECS
from kgen.space import enumerate_space
from kgen.spec import load_spec

SMS = (1, 2, 24, 132, 188, 400)
ODD_POINTS = (  # many splits of many rows; of few rows; more rows than blocks
    {"batch": 4, "nodes": 8, "prefix": 65536}, {"batch": 1, "nodes": 24, "prefix": 16384},
    {"batch": 3, "nodes": 8, "prefix": 131072}, {"batch": 1, "nodes": 1, "prefix": 131072},
    {"batch": 64, "nodes": 256, "prefix": 4096}, {"batch": 1, "nodes": 1, "prefix": 0},
)  # fmt: skip


def problems(plan: Plan, kernels: Sequence[Kernel]) -> list[str]:
    """What a plan asks beyond its kernels' threads and shared bytes, or beyond a grid's size."""
    compiled = {kernel.entry: kernel for kernel in kernels}
    found = []
    for launch in plan.sharing().launches:
        kernel = compiled[launch.entry]
        if not 32 <= launch.threads <= kernel.threads or launch.threads % 32:
            found.append(f"{launch.entry}: {launch.threads} threads of {kernel.threads}")
        if launch.shared_bytes != kernel.shared_bytes:
            found.append(f"{launch.entry}: {launch.shared_bytes} shared bytes of {kernel.shared_bytes}")
        if min(launch.grid) < 1 or max(launch.grid[1:]) > 65535:
            found.append(f"{launch.entry}: grid {launch.grid}")
    return found


@pytest.mark.parametrize("name", sorted(families()))
def test_every_launch_fits_its_kernel(name: str) -> None:
    spec = load_spec(SPECS / f"{name}.yaml")
    layout_name = next(iter(spec.layouts))
    space = enumerate_space(spec, layout_name, spec.targets["sm_120"]).candidates
    points = [item.point for item in spec.workload.points]
    points += [point for point in ODD_POINTS if point.keys() == points[0].keys()]
    for layout, candidate in product(spec.layouts.values(), (spec.default, *space[:: len(space) // 12])):
        kernels = spec.family.kernels(candidate, layout)
        for point, sms, resident in product(points, SMS, (1, 2)):
            capacity = spec.family.capacity(spec.family.point_case(point)) if point in points[:4] else point
            plan = spec.family.plan(candidate, layout, capacity, sms=sms, resident_blocks=resident)
            assert problems(plan, kernels) == [], (candidate, layout, point, sms)


def test_a_launch_that_does_not_fit_is_found() -> None:
    spec = load_spec(SPECS / "verify_mla.yaml")
    layout = spec.layouts["h8_p1"]
    flash, combine, schedule = spec.family.kernels(spec.default, layout)
    plan = spec.family.plan(spec.default, layout, ODD_POINTS[0], sms=188, resident_blocks=1)
    assert problems(plan, [flash, combine, schedule]) == []
    found = problems(plan, [flash, replace(combine, threads=64), schedule])
    assert found == [f"verify_mla_combine: {plan.launches[1].threads} threads of 64"]
    found = problems(plan, [replace(flash, shared_bytes=16), combine, schedule])
    assert found == [f"verify_mla_flash: {flash.shared_bytes} shared bytes of 16"]
