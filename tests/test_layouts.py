"""One source for every layout: heads that divide no tile, other pages, and as many nodes as a tree has."""

from __future__ import annotations

from pathlib import Path

import pytest

from kgen.build import EMULATOR, build
from kgen.build.toolchain import find_toolchain
from kgen.emulator import EmulatedModule
from kgen.family import Candidate, Case, Layout
from kgen.render import render
from kgen.resources import SPECS
from kgen.spec import load_spec
from kgen.validate import Verdict, validate
from kgen.validate.launchers import EmulatorLauncher

SPEC = load_spec(SPECS / "verify_mla.yaml")
H8 = SPEC.layouts["h8_p1"]
SMALL = {"tile_m": 16, "warps": 4, "row_groups": 1, "stages": 2}
LAYOUTS = {"1x16": (1, 16), "5x32": (5, 32), "24x128": (24, 128)}  # heads x page size
TELLING = ("ragged", "page_tail", "chain")  # cases whose rows and pages end in odd places
TREE = Case("tree", {"prefixes": [40, 300], "nodes": [256, 3], "lse": True})


class Kernel:
    """One candidate, built for the emulator once."""

    def __init__(self, candidate: Candidate, cache_dir: Path) -> None:
        self.candidate = candidate
        self.source = render(SPEC.family, candidate, H8)
        toolchain = find_toolchain(EMULATOR)
        (built,) = build([self.source], arch=EMULATOR, toolchain=toolchain, cache_dir=cache_dir, jobs=1)
        assert built.path is not None, built.reason
        self.launcher = EmulatorLauncher(EmulatedModule(built.path))

    def check(self, layout: Layout, cases: list[Case]) -> Verdict:
        return validate(
            SPEC.family, self.candidate, layout, SPEC.tolerances, self.launcher,
            target_sms=188, resident_blocks=1, cases=cases, seeds=(0,),
        )  # fmt: skip


@pytest.fixture(scope="module", params=[{}, SMALL], ids=["default", "16 rows"])
def kernel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    return Kernel({**SPEC.default, **request.param}, tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize("name", LAYOUTS)
def test_heads_and_pages(name: str, kernel: Kernel) -> None:
    heads, page_size = LAYOUTS[name]
    layout = {**H8, "heads": heads, "page_size": page_size}
    assert render(SPEC.family, kernel.candidate, layout).sha256 == kernel.source.sha256
    cases = [case for case in SPEC.family.cases(layout) if case.name in TELLING]
    assert len(cases) == len(TELLING)
    assert kernel.check(layout, cases).reason == ""


def test_a_tree_of_256_nodes(kernel: Kernel) -> None:
    verdict = kernel.check({**H8, "heads": 1}, [TREE])
    assert verdict.reason == ""
    assert {result.name.split(",")[0].split(" in ")[0] for result in verdict.cases} == {"tree"}


def test_wrong_heads_are_found(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    scalars = type(SPEC.family).scalars
    monkeypatch.setattr(type(SPEC.family), "scalars", lambda self, *given: {**scalars(self, *given), "heads": 4})
    few = Case("few", {"prefixes": [40], "nodes": [3], "lse": True})
    assert "few" in kernel.check({**H8, "heads": 5}, [few]).reason
