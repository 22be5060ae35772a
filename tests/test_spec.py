"""Specs: what a good one holds, and the exact words for every kind of mistake."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import FrozenInstanceError
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped,unused-ignore]
import pytest
from conftest import compare_text
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kgen.errors import InputError, SpecError
from kgen.family import Tolerance
from kgen.resources import SPECS
from kgen.spec import load_spec
from kgen.spec.file import json_schema
from kgen.spec.located_yaml import SpecFileError, read_located
from kgen.targets import Target

SHIPPED = SPECS / "verify_mla.yaml"
GOOD = """\
family: verify_mla
targets: [sm_120]
layouts:
  small: &mla {heads: 8, latent: 512, rope: 64, dtype: bf16, page_size: 1, scale_dim: 192}
  paged: {<<: *mla, page_size: 64}
tunables:
  algorithm: [flash]
  tile_m: [16, 64]
  tile_n: [16, 32]
  stages: [1, 2]
  warps: [4, 8]
  copiers: [all]
  row_groups: [1, 2]
  k_split: [1, 2]
  key_split: [1]
  gather: [bulk]
  refill: [late, eager]
  blocks_per_sm: [1]
  item_overhead_rows: [32, 128]
default:
  algorithm: flash
  tile_m: 64
  tile_n: 32
  stages: 2
  warps: 8
  copiers: all
  row_groups: 2
  k_split: 2
  key_split: 1
  gather: bulk
  refill: late
  blocks_per_sm: 1
  item_overhead_rows: 32
oracle: {algorithm: oracle, warps: 4}
workload:
  axes:
    prefix: [4096]
    batch: [1, 4]
    nodes: [8, 16]
  weights: {batch: {4: 3.0}}
tolerances:
  out: {relative_l2: 5e-3, max_abs: 0.05}
  lse: {relative_l2: 1.0e-4, max_abs: 0.02}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def errors_of(text: str | bytes) -> list[str]:
    path = Path("x.yaml")
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    return str(caught.value).splitlines()


def edited(old: str, new: str) -> str:
    assert GOOD.count(old) == 1, old
    return GOOD.replace(old, new)


def test_a_spec_is_read(here: Path) -> None:
    Path("x.yaml").write_text(GOOD)
    spec = load_spec(Path("x.yaml"))
    assert spec.family.name == "verify_mla"
    assert spec.layouts["paged"] == {
        "heads": 8, "latent": 512, "rope": 64, "dtype": "bf16", "page_size": 64, "scale_dim": 192,
    }  # fmt: skip
    assert list(spec.layouts["paged"]) == list(spec.layouts["small"])
    assert spec.tunables["tile_m"] == (16, 64)
    assert spec.default["gather"] == "bulk"
    assert spec.oracle == {"algorithm": "oracle", "warps": 4}
    assert spec.tolerances["out"] == Tolerance(5e-3, 0.05)
    assert spec.targets["sm_120"].shared_bytes_per_block == 101376
    with pytest.raises(FrozenInstanceError):
        spec.path = Path("y.yaml")  # type: ignore[misc]


def test_points_follow_the_family_axes_and_their_weights_add_up_to_one(here: Path) -> None:
    Path("x.yaml").write_text(GOOD)
    points = load_spec(Path("x.yaml")).workload.points
    assert [(list(item.point), list(item.point.values()), item.weight) for item in points] == [
        (["batch", "nodes", "prefix"], [1, 8, 4096], 0.125),
        (["batch", "nodes", "prefix"], [1, 16, 4096], 0.125),
        (["batch", "nodes", "prefix"], [4, 8, 4096], 0.375),
        (["batch", "nodes", "prefix"], [4, 16, 4096], 0.375),
    ]


def test_the_shipped_spec_covers_the_models_it_names() -> None:
    spec = load_spec(SHIPPED)
    assert list(spec.targets) == ["sm_120", "sm_121", "sm_90"]
    assert {(layout["heads"], layout["page_size"]) for layout in spec.layouts.values()} == {
        (heads, page) for heads in (8, 16, 32, 64, 128) for page in (1, 64)
    }
    assert all(layout["scale_dim"] == 192 for layout in spec.layouts.values())
    assert [target.nvcc_arch for target in spec.targets.values()] == list(spec.targets)


def test_the_figures_of_sm_120() -> None:
    target = load_spec(SHIPPED).targets["sm_120"]
    assert isinstance(target, Target)
    assert (target.sms, target.shared_bytes_per_sm, target.warps_per_sm, target.dram_gb_s) == (188, 102400, 48, 1792)
    flops = target.sms * target.mma_bf16_flop_per_clk * target.clock_mhz * 1e6
    assert flops == pytest.approx(503.8e12, rel=1e-3)


def test_the_digest_is_of_the_spec_and_its_targets(here: Path) -> None:
    Path("x.yaml").write_text(GOOD)
    before = load_spec(Path("x.yaml")).sha256
    Path("y.yaml").write_text(GOOD)
    assert load_spec(Path("y.yaml")).sha256 == before
    Path("x.yaml").write_text(GOOD + "# a comment\n")
    assert load_spec(Path("x.yaml")).sha256 != before
    Path("targets").mkdir()
    text = (SPECS / "targets/sm_120.yaml").read_text()
    Path("targets/sm_120.yaml").write_text(text.replace("sms: 188", "sms: 170"))
    beside = load_spec(Path("y.yaml"))
    assert beside.sha256 != before
    assert beside.targets["sm_120"].sms == 170


MISTAKES: dict[str, tuple[str | bytes, list[str]]] = {
    "unknown top-level key": (
        edited("oracle: {", "orcale: {"),
        [
            "x.yaml:1: oracle: the key is required",
            "x.yaml:34: orcale: unknown key; did you mean 'oracle'?",
        ],
    ),
    "a tunable of nothing": (
        edited("stages: [1, 2]", "stages: [0, 2]"),
        ["x.yaml:10: tunables.stages[0]: must be at least 1, 0"],
    ),
    "an axis value that no machine holds": (
        edited("batch: [1", "batch: [1, 2000000000"),
        ["x.yaml:38: workload.axes.batch[1]: must be at most 16777216, 2000000000"],
    ),
    "a weight whose products are nothing": (
        edited("weights: {batch: {4: 3.0}}", "weights: {batch: {4: 1.0e-320}}"),
        ["x.yaml:40: workload.weights.batch[4]: must be from 1e-09 to 1e+09, 9.99989e-321"],
    ),
    "unknown nested key": (
        edited("out: {relative_l2: 5e-3,", "out: {relative_l2: 5e-3, max_ab: 1,"),
        ["x.yaml:42: tolerances.out.max_ab: unknown key; did you mean 'max_abs'?"],
    ),
    "unknown family": (
        edited("family: verify_mla", "family: verify_mal"),
        ["x.yaml:1: family: unknown kernel family, 'verify_mal'; did you mean 'verify_mla'?"],
    ),
    "unknown target": (
        edited("[sm_120]", "[sm_120, sm_1200]"),
        [
            (
                "x.yaml:2: targets[1]: no such target, 'sm_1200'; "
                "its figures are due in targets/sm_1200.yaml; did you mean 'sm_120'?"
            )
        ],
    ),
    "empty list": (edited("tile_m: [16, 64]", "tile_m: []"), ["x.yaml:8: tunables.tile_m: too few items, a list"]),
    "duplicate value": (
        edited("tile_n: [16, 32]", "tile_n: [16, 32, 16]"),
        ["x.yaml:9: tunables.tile_n[2]: the value appears twice, 16"],
    ),
    "duplicate key": (
        edited("  stages: [1, 2]\n", "  stages: [1, 2]\n  stages: [3]\n"),
        ["x.yaml:11: tunables.stages: the key appears twice; the first is on line 10"],
    ),
    "boolean value": (
        edited("gather: [bulk]", "gather: [bulk, true]"),
        ["x.yaml:16: tunables.gather[1]: must be an integer or a name, true"],
    ),
    "mixed kinds": (
        edited("stages: [1, 2]", 'stages: [1, 2, "two"]'),
        ["x.yaml:10: tunables.stages[2]: integers and names are mixed in one tunable, 'two'"],
    ),
    "unknown name of a tunable": (
        edited("gather: [bulk]", "gather: [bulk, magic]").replace("refill: [late, eager]", "refill: [late, eeger]"),
        [
            "x.yaml:16: tunables.gather[1]: verify_mla has no such gather, 'magic'; known: bulk, cp_async",
            "x.yaml:17: tunables.refill[1]: verify_mla has no such refill, 'eeger'; known: late, eager",
        ],
    ),
    "unknown algorithm": (
        edited("algorithm: [flash]", "algorithm: [flash, flush]").replace("{algorithm: oracle,", "{algorithm: orakel,"),
        [
            "x.yaml:7: tunables.algorithm[1]: verify_mla has no such algorithm, 'flush'; known: flash, oracle",
            "x.yaml:34: oracle.algorithm: verify_mla has no such algorithm, 'orakel'; known: flash, oracle",
        ],
    ),
    "numbers where names are due": (
        edited("gather: [bulk]", "gather: [1]").replace("  gather: bulk\n", "  gather: 1\n"),
        ["x.yaml:16: tunables.gather[0]: verify_mla has no such gather, 1; known: bulk, cp_async"],
    ),
    "a name where numbers are due": (
        edited("stages: [1, 2]", "stages: [two]").replace("  stages: 2\n", "  stages: two\n"),
        ["x.yaml:10: tunables.stages[0]: must be an integer, 'two'"],
    ),
    "a number where a name is due": (
        edited("family: verify_mla", "family: 7"),
        ["x.yaml:1: family: must be text, 7"],
    ),
    "a fraction where an integer is due": (
        edited("batch: [1, 4]", "batch: [1, 4.5]").replace("  weights: {batch: {4: 3.0}}\n", ""),
        ["x.yaml:38: workload.axes.batch[1]: must be an integer, 4.5"],
    ),
    "text where a number is due": (
        edited("max_abs: 0.05", "max_abs: small"),
        ["x.yaml:42: tolerances.out.max_abs: must be a number, 'small'"],
    ),
    "zero": (
        edited("nodes: [8, 16]", "nodes: [8, 0]"),
        ["x.yaml:39: workload.axes.nodes[1]: must be greater than 0, 0"],
    ),
    "not finite": (
        edited("max_abs: 0.05", "max_abs: 1e999"),
        ["x.yaml:42: tolerances.out.max_abs: Input should be a finite number, inf"],
    ),
    "default outside of the space": (
        edited("  tile_m: 64", "  tile_m: 48"),
        ["x.yaml:22: default.tile_m: the default is not among the tunable's values, 48; use one of: 16, 64"],
    ),
    "default lacks a tunable": (
        edited("  stages: 2\n", ""),
        ["x.yaml:20: default.stages: the tunable is missing"],
    ),
    "default names an unknown tunable": (
        edited("  warps: 8\n", "  warps: 8\n  warp: 8\n"),
        ["x.yaml:26: default.warp: no such tunable; did you mean 'warps'?"],
    ),
    "default fits no target": (
        edited("stages: [1, 2]", "stages: [1, 2, 4]").replace("  stages: 2\n", "  stages: 4\n"),
        [
            (
                "x.yaml:20: default: the default candidate breaks the rule 'shared memory fits', "
                "on sm_120/small, sm_120/paged; pick one that fits everywhere"
            )
        ],
    ),
    "family needs a tunable": (
        edited("  stages: [1, 2]\n", "").replace("  stages: 2\n", ""),
        [
            (
                "x.yaml:19: family verify_mla needs a tunable or layout field called 'stages'; "
                "compare with a shipped spec of this family"
            )
        ],
    ),
    "oracle of the wrong kind": (
        edited("warps: 4}", "warps: four}"),
        ["x.yaml:34: oracle.warps: must be an integer, 'four'"],
    ),
    "unknown axis": (
        edited("    nodes: [8, 16]", "    node: [8, 16]"),
        [
            "x.yaml:36: workload.axes.nodes: the axis of verify_mla is missing",
            "x.yaml:39: workload.axes.node: no such axis of verify_mla; did you mean 'nodes'?",
        ],
    ),
    "weight of a value that is not on the axis": (
        edited("{batch: {4: 3.0}}", "{batch: {8: 3.0}}"),
        ["x.yaml:40: workload.weights.batch[8]: no such value on the axis; use one of: 1, 4"],
    ),
    "weight of an unknown layout": (
        edited("  weights: {batch: {4: 3.0}}", "  layouts: {smal: 2}"),
        ["x.yaml:40: workload.layouts.smal: no such layout; did you mean 'small'?"],
    ),
    "a dtype without a kernel": (
        edited("dtype: bf16", "dtype: fp8"),
        [
            "x.yaml:4: layouts.small.dtype: must be bf16 or e4m3, fp8",
            "x.yaml:4: layouts.paged.dtype: must be bf16 or e4m3, fp8",
        ],
    ),
    "heads that nothing has": (
        edited("heads: 8", "heads: 0"),
        [
            "x.yaml:4: layouts.small.heads: must be a whole number from 1 to 1024, 0",
            "x.yaml:4: layouts.paged.heads: must be a whole number from 1 to 1024, 0",
        ],
    ),
    "rope that is no whole fragment": (
        edited("rope: 64", "rope: 8"),
        [
            "x.yaml:4: layouts.small.rope: must be a multiple of 32, 8",
            "x.yaml:4: layouts.paged.rope: must be a multiple of 32, 8",
        ],
    ),
    "layouts differ in fields": (
        edited("{<<: *mla, page_size: 64}", "{<<: *mla, page_sise: 64}").replace("bf16, page_size: 1,", "bf16,"),
        [
            "x.yaml:4: layouts.small.page_sise: the field of a layout is missing",
            "x.yaml:4: layouts.small: page_size must be a whole number from 1 to 65536, it is missing",
            "x.yaml:5: layouts.paged: page_size must be a whole number from 1 to 65536, it is missing",
        ],
    ),
    "layout lacks what the family compiles in": (
        edited("latent: 512, ", ""),
        [
            "x.yaml:4: layouts.small.latent: the field of a layout is missing",
            "x.yaml:5: layouts.paged.latent: the field of a layout is missing",
        ],
    ),
    "an unknown output": (
        edited("  lse: {", "  les: {"),
        [
            "x.yaml:41: tolerances.lse: the output of verify_mla is missing",
            "x.yaml:43: tolerances.les: no such output of verify_mla; did you mean 'lse'?",
        ],
    ),
    "a list for a mapping": ("- family\n", ["x.yaml:1: must be a mapping, a list"]),
    "a mapping for a list": (edited("[sm_120]", "{sm_120: 1}"), ["x.yaml:2: targets: must be a list, a mapping"]),
    "text alone": ("family", ["x.yaml:1: must be a mapping, 'family'"]),
    "a key that is no name": (
        edited("  small: &mla", "  sm-all: &mla"),
        ["x.yaml:4: layouts.sm-all: the key must be a name of letters, digits and underscores, 'sm-all'"],
    ),
    "a value that is no name": (
        edited("gather: [bulk]", 'gather: [bulk, "${x}"]'),
        ["x.yaml:16: tunables.gather[1]: must be a name of letters, digits and underscores, '${x}'"],
    ),
    "a negative value": (
        edited("stages: [1, 2]", "stages: [1, 2, -1]"),
        ["x.yaml:10: tunables.stages[2]: must not be negative, -1"],
    ),
    "an enormous space": (
        edited("tile_m: [16, 64]", f"tile_m: {list(range(16, 10016))}"),
        ["x.yaml:6: tunables: the space is too large, 1280000 combinations; at most 1000000"],
    ),
    "a tag": (
        edited("family: verify_mla", "family: !!python/name:os.system verify_mla"),
        ["x.yaml:1: family: the tag 'tag:yaml.org,2002:python/name:os.system' is not allowed; write plain data"],
    ),
    "syntax": (
        edited("targets: [sm_120]", "targets: [sm_120"),
        ["x.yaml:3: not YAML, expected ',' or ']', but got ':'"],
    ),
    "unknown alias": (edited("*mla", "*mal"), ["x.yaml:5: not YAML, found undefined alias 'mal'"]),
    "two documents": (GOOD + "---\na: 1\n", ["x.yaml:44: not YAML, but found another document"]),
    "empty": ("", ["x.yaml: the file is empty"]),
    "only comments": ("# nothing\n", ["x.yaml: the file is empty"]),
    "not UTF-8": (b"family: verify_mla\n# caf\xe9\n", ["x.yaml:2: not UTF-8 text, byte 0xe9; save the file as UTF-8"]),
    "a NUL": (
        b"family: \x00\n",
        ["x.yaml: not YAML, unacceptable character #x0000: special characters are not allowed"],
    ),
    "too large": ("# " + "x" * 300_000, ["x.yaml: the file is too large; at most 256 KiB"]),
    "too deep": ("[" * 5000, ["x.yaml:1: not YAML, nested deeper than 16 levels"]),
    "an alias of itself": ("a: &a [*a]", ["x.yaml:1: a: an alias contains itself"]),
    "an alias bomb": (
        "a: &a [1]\n" + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in pairwise("abcdefgh")),
        ["x.yaml:6: f: more than 20000 values once aliases are expanded"],
    ),
    "a merge bomb": (
        "a: &a {}\n"
        + "".join(f"{b}: &{b} {{<<: [{', '.join([f'*{a}'] * 9)}]}}\n" for a, b in pairwise("abcdefgh")),
        ["x.yaml:6: f: more than 20000 values once aliases are expanded"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_with_its_line(here: Path, mistake: str) -> None:
    text, expected = MISTAKES[mistake]
    assert errors_of(text) == expected


def test_all_mistakes_of_a_file_are_reported_at_once(here: Path) -> None:
    text = edited("[sm_120]", "[sm_12]").replace("  tile_m: 64", "  tile_m: 48").replace("0.02", "-1")
    text = text.replace("    nodes: [8, 16]\n", "    nodes: [8, 8]\n") + "extra: 1\n"
    assert [re.sub(r"; .*", "", line) for line in errors_of(text)] == [
        "x.yaml:2: targets[0]: no such target, 'sm_12'",
        "x.yaml:22: default.tile_m: the default is not among the tunable's values, 48",
        "x.yaml:39: workload.axes.nodes[1]: the value appears twice, 8",
        "x.yaml:43: tolerances.lse.max_abs: must be greater than 0, -1",
        "x.yaml:44: extra: unknown key",
    ]


def test_mistakes_in_a_target_file_name_that_file(here: Path) -> None:
    Path("targets").mkdir()
    text = (SPECS / "targets/sm_120.yaml").read_text()
    text = text.replace("sms: 188", "sms: 0").replace("launch_us:", "lanch_us:").replace("[12, 0]", "[12]")
    Path("targets/sm_120.yaml").write_text(text)
    assert errors_of(GOOD) == [
        "targets/sm_120.yaml:3: compute_capability: too few items, a list",
        "targets/sm_120.yaml:3: launch_us: the key is required",
        "targets/sm_120.yaml:4: sms: must be greater than 0, 0",
        "targets/sm_120.yaml:19: lanch_us: unknown key; did you mean 'launch_us'?",
    ]


def test_a_folder_and_a_missing_file_are_named(here: Path) -> None:
    Path("x.yaml").mkdir()
    with pytest.raises(SpecError, match=r"^x\.yaml: not a file$"):
        load_spec(Path("x.yaml"))
    with pytest.raises(SpecError, match=r"^y\.yaml: no such file$"):
        load_spec(Path("y.yaml"))


def test_the_first_of_several_errors_is_the_error(here: Path) -> None:
    Path("x.yaml").write_text("- a\n")
    with pytest.raises(SpecFileError) as caught:
        load_spec(Path("x.yaml"))
    assert (caught.value.where, caught.value.wrong, caught.value.exit_code) == ("x.yaml:1", "must be a mapping", 2)


def test_unknown_layouts_and_targets_name_the_known_ones() -> None:
    spec = load_spec(SHIPPED)
    with pytest.raises(InputError, match=r"^--layout: .* has no such layout, 'h8'; known: h8_p1, "):
        spec.layout("h8")
    with pytest.raises(InputError, match=r"no such target, 'gfx'; known: sm_120, sm_121, sm_90$"):
        spec.target("gfx")


def test_scalars_are_those_of_yaml_1_2(here: Path) -> None:
    Path("x.yaml").write_text("[on, yes, 0x10, 1_000, 1:30, 2020-01-01, 5e-3, .5, 010, true, ~, '1']\n")
    assert read_located(Path("x.yaml")).data == [
        "on", "yes", "0x10", "1_000", "1:30", "2020-01-01", 0.005, 0.5, 10, True, None, "1",
    ]  # fmt: skip


def with_text_keys(data: Any) -> Any:
    """Data as JSON has it."""
    return json.loads(json.dumps(data))


def test_the_schema_for_editors_is_fresh_and_accepts_the_shipped_specs(request: pytest.FixtureRequest) -> None:
    text = json.dumps(json_schema(), indent=2) + "\n"
    compare_text(SPECS / "kernel_spec.schema.json", text, update=bool(request.config.getoption("--update-golden")))
    validator = jsonschema.Draft202012Validator(json_schema())
    for path in SPECS.glob("*.yaml"):
        validator.validate(with_text_keys(read_located(path).data))
        assert path.read_text().splitlines()[0] == "# yaml-language-server: $schema=kernel_spec.schema.json"


def test_the_schema_refuses_what_the_models_refuse(here: Path) -> None:
    validator = jsonschema.Draft202012Validator(json_schema())
    for mistake in ("unknown top-level key", "empty list", "boolean value", "zero", "a list for a mapping"):
        text = MISTAKES[mistake][0]
        Path("x.yaml").write_text(str(text))
        assert not validator.is_valid(with_text_keys(read_located(Path("x.yaml")).data)), mistake


def load_quietly(path: Path) -> None:
    try:
        load_spec(path)
    except SpecError as error:
        assert str(error)  # noqa: PT017 - any other exception is the failure


FUZZ = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FUZZ
@given(content=st.binary(max_size=200))
def test_no_bytes_end_in_a_traceback(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(content)
    load_quietly(path)


TOKENS = [
    "0",
    "-1",
    "1e9",
    "true",
    "null",
    "[",
    "]",
    "{",
    "}",
    ":",
    "&a",
    "*a",
    "<<: ",
    "? ",
    "- ",
    "x",
    "'",
    "!!int ",
    "\t",
]


@FUZZ
@given(data=st.data())
def test_no_mutation_of_a_spec_ends_in_a_traceback(tmp_path: Path, data: st.DataObject) -> None:
    text = GOOD
    for _ in range(data.draw(st.integers(1, 4))):
        words = [match.span() for match in re.finditer(r"[\w.]+|[^\w\s]", text)]
        start, end = data.draw(st.sampled_from(words))
        text = text[:start] + data.draw(st.sampled_from([*TOKENS, "", "\n"])) + text[end:]
    path = tmp_path / "x.yaml"
    path.write_text(text)
    load_quietly(path)


def test_a_target_in_a_copied_folder_is_found_there(here: Path) -> None:
    shutil.copytree(SPECS, here / "specs")
    (here / "specs/targets/sm_120.yaml").rename(here / "specs/targets/sm_999.yaml")
    Path("specs/x.yaml").write_text(edited("[sm_120]", "[sm_999]"))
    assert load_spec(Path("specs/x.yaml")).targets["sm_999"].nvcc_arch == "sm_120"
