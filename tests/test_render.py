"""Rendering: one text per candidate, with the origin of every line for compilers and for errors."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from conftest import Golden, compare_text

from kgen.errors import SpecError
from kgen.families.verify_mla import VerifyMla
from kgen.family import Candidate, Kernel, Layout, Parameter, ParameterStruct, Value
from kgen.render import Source, render
from kgen.resources import SPECS, TEMPLATES
from kgen.spec import Spec, load_spec


class Scale(VerifyMla):
    """A family small enough to read its whole source; what it does not use is verify_mla's."""

    name = "scale"
    template = "scale.cu.j2"
    params = ParameterStruct((Parameter("x", "pointer"), Parameter("n", "int32"), Parameter("stride", "int64")))
    layout_constants = ("dtype",)

    def label(self, candidate: Candidate) -> str:
        return f"w{candidate['warps']}"

    def constants(self, candidate: Candidate, layout: Layout) -> Mapping[str, Value]:
        return {"warps": candidate["warps"], "threads": int(candidate["warps"]) * 32, "dtype": layout["dtype"]}

    def kernels(self, candidate: Candidate, layout: Layout) -> tuple[Kernel, ...]:
        return (Kernel("scale", int(candidate["warps"]) * 32, 0),)


TEMPLATE = """\
//# What this template is about.
#include <cstdint>
#include <kgen/scale.cuh>
#include <kgen/base.cuh>

struct Params {
//% for parameter in parameters
  static constexpr int ${parameter.name}_offset = ${parameter.offset};  // ${parameter.kind}
//% endfor
};

//% if threads > 64
//# Only for many warps.
static int zeros[2][1] = {{0}};
//% else
static int few[1] = {{0}};
//% endif
/*# A comment
    of two lines. #*/
extern "C" int scale() { return scaled(${threads}) + /*% if warps == 4 %*/four()/*% else %*/0/*% endif %*/; }  //# tail
"""
HEADERS = {
    "scale.cuh": '#pragma once\n#include "kgen/base.cuh"\n\nstatic int scaled(int x) {\n  return base(x) * 2;\n}\n',
    "base.cuh": "// Doubles nothing.\n//# for maintainers\n#pragma once\nstatic int base(int x) { return x; }\n",
}


@pytest.fixture
def templates(tmp_path: Path) -> Path:
    folder = tmp_path / "templates"
    (folder / "include/kgen").mkdir(parents=True)
    (folder / "scale.cu.j2").write_text(TEMPLATE)
    for name, text in HEADERS.items():
        (folder / "include/kgen" / name).write_text(text)
    return folder


def rendered(templates: Path, warps: int = 4) -> Source:
    return render(Scale(), {"warps": warps, "waves": 2}, {"dtype": "bf16", "heads": 8}, templates)


def with_template(templates: Path, old: str, new: str) -> Path:
    assert TEMPLATE.count(old) == 1, old
    (templates / "scale.cu.j2").write_text(TEMPLATE.replace(old, new))
    return templates


def diagnostics(text: str, folder: Path) -> str:
    path = folder / "rendered.cpp"
    path.write_text(text)
    command = ["g++", "-std=c++20", "-fsyntax-only", "-DKGEN_EMULATOR", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr


def test_the_whole_text(templates: Path, golden: Golden) -> None:
    source = rendered(templates)
    golden(source.text + "=" * 80 + "\n" + source.mapped_text)


def test_an_expected_text_that_is_stale_or_missing_fails(tmp_path: Path) -> None:
    path = tmp_path / "folder/expected.txt"
    with pytest.raises(pytest.fail.Exception, match=r"expected\.txt does not exist: run with --update-golden"):
        compare_text(path, "new", update=False)
    compare_text(path, "old", update=True)
    compare_text(path, "old", update=False)
    with pytest.raises(AssertionError, match=r"expected\.txt is stale: run with --update-golden"):
        compare_text(path, "new", update=False)


def test_identity(templates: Path) -> None:
    source = rendered(templates)
    assert source == rendered(templates)
    assert source.entries == ("scale",)
    assert re.fullmatch(r"scale__w4__[0-9a-f]{8}", source.name)
    assert source.sha256.startswith(source.name[-8:])
    assert source.sha256 != rendered(templates, warps=8).sha256


def test_the_order_of_tunables_and_those_not_compiled_in_leave_no_trace(templates: Path) -> None:
    layout = {"dtype": "bf16"}
    one = render(Scale(), {"warps": 4, "waves": 2}, layout, templates)
    other = render(Scale(), {"waves": 1, "warps": 4}, layout, templates)
    assert one == other


def test_cpp_initialisers_survive(templates: Path) -> None:
    assert "static int zeros[2][1] = {{0}};" in rendered(templates).text
    assert "static int few[1] = {{0}};" in rendered(templates, warps=1).text


def test_every_header_is_there_once_and_the_text_compiles_alone(templates: Path, tmp_path: Path) -> None:
    source = rendered(templates, warps=8)
    assert source.text.count("static int base(int x)") == 1
    assert "#include <kgen/" not in source.text
    assert "#include <cstdint>" in source.text
    assert "#pragma once" not in source.text
    assert diagnostics(source.text, tmp_path) == ""
    assert diagnostics(source.mapped_text, tmp_path) == ""


def test_no_path_of_this_machine_is_in_the_source(templates: Path) -> None:
    source = rendered(templates)
    assert str(templates.parent) not in source.text + source.mapped_text
    assert "#line" not in source.text


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("//# Only for many warps.\n", ""),
        ("//# What this template is about.\n", "//# Another.\n//# Two lines.\n"),
        ("//% endif\n/*# A", "//% endif\n//# moved here\n/*# A"),
        ("};\n\n//% if", "};\n//# moved here\n\n//% if"),
        ("};\n\n//% if", "};\n\n//# moved here\n//% if"),
        ("  //# tail", ""),
        ("static int few[1]", "  //# indented\nstatic int few[1]"),
    ],
)
def test_a_template_comment_leaves_no_trace(templates: Path, old: str, new: str) -> None:
    for warps in (1, 4):
        (templates / "scale.cu.j2").write_text(TEMPLATE)
        before = rendered(templates, warps)
        after = rendered(with_template(templates, old, new), warps)
        assert after.text == before.text
        assert after.sha256 == before.sha256


def test_a_header_comment_for_maintainers_leaves_no_trace(templates: Path) -> None:
    before = rendered(templates).sha256
    (templates / "include/kgen/base.cuh").write_text(HEADERS["base.cuh"].replace("//# for maintainers\n", ""))
    assert rendered(templates).sha256 == before


def test_line_endings_and_trailing_spaces_leave_no_trace(templates: Path) -> None:
    before = rendered(templates).text
    (templates / "scale.cu.j2").write_bytes(TEMPLATE.replace("};\n", "};  \n").replace("\n", "\r\n").encode())
    (templates / "include/kgen/scale.cuh").write_bytes(HEADERS["scale.cuh"].replace("\n", "\r\n").encode())
    assert rendered(templates).text == before


def test_a_compiler_names_the_line_of_the_header(templates: Path, tmp_path: Path) -> None:
    (templates / "include/kgen/scale.cuh").write_text(HEADERS["scale.cuh"].replace("base(x)", "bass(x)"))
    assert "templates/include/kgen/scale.cuh:5:" in diagnostics(rendered(templates).mapped_text, tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "warps", "line"),
    [
        ("struct Params", "strukt Params", 4, 6),
        ("static constexpr int ${parameter.name}", "static constexpr itn ${parameter.name}", 4, 8),
        ("static int zeros", "static itn zeros", 4, 14),
        ("static int few", "static itn few", 1, 16),
        ("return scaled(", "return skaled(", 4, 20),
    ],
    ids=["plain", "in a loop", "after a statement and a comment", "in an else", "after a comment of two lines"],
)
def test_a_compiler_names_the_line_of_the_template(
    templates: Path, tmp_path: Path, old: str, new: str, warps: int, line: int
) -> None:
    output = diagnostics(rendered(with_template(templates, old, new), warps).mapped_text, tmp_path)
    first = re.search(r"^(.*?:\d+):\d+: error", output, re.MULTILINE)
    assert first is not None
    assert first[1] == f"templates/scale.cu.j2:{line}"


def test_a_continued_line_is_not_torn(templates: Path, tmp_path: Path) -> None:
    macro = "#define SUM(a, b) \\\n//% if warps == 4\n  (a) + \\\n//% endif\n  (b)\nstatic int sum = SUM(1, 2);\n"
    source = rendered(with_template(templates, "struct Params", macro + "struct Params"), warps=4)
    assert "four" in diagnostics(source.mapped_text, tmp_path)
    assert "sum" not in diagnostics(source.mapped_text, tmp_path)
    assert diagnostics(source.mapped_text.replace("static int sum", "static itn sum"), tmp_path).startswith(
        "templates/scale.cu.j2:11:"
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("scaled(${threads})", "scaled(${thread})", "templates/scale.cu.j2:20: .*, 'thread' is undefined"),
        ("${parameter.offset}", "${parameter.ofset}", "templates/scale.cu.j2:8: .*no attribute 'ofset'"),
        ("//% if threads > 64", "//% if thread > 64", "templates/scale.cu.j2:12: .*'thread' is undefined"),
        ("//% if threads > 64", "//% if dtype > 64", "templates/scale.cu.j2:12: .*'>' not supported"),
        ("//% endfor", "//% endwhile", "templates/scale.cu.j2:9: the template is not Jinja, .*endwhile"),
        (
            "<kgen/base.cuh>",
            "<kgen/none.cuh>",
            "templates/scale.cu.j2:4: cannot include <kgen/none.cuh>, .*No such file",
        ),
    ],
)
def test_a_mistake_in_a_template_names_its_line(templates: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(SpecError, match=f"^{message}"):
        rendered(with_template(templates, old, new))


def test_a_missing_include_of_a_header_names_the_header(templates: Path) -> None:
    (templates / "include/kgen/scale.cuh").write_text("#pragma once\n#include <kgen/none.cuh>\n")
    with pytest.raises(SpecError, match=r"^templates/include/kgen/scale\.cuh:2: cannot include <kgen/none\.cuh>"):
        rendered(templates)


def test_a_missing_template_is_named(templates: Path) -> None:
    (templates / "scale.cu.j2").unlink()
    with pytest.raises(SpecError, match=r"^templates/scale\.cu\.j2: no such template"):
        rendered(templates)


SHIPPED = [load_spec(path) for path in sorted(SPECS.glob("*.yaml"))]


@pytest.mark.parametrize("spec", SHIPPED, ids=lambda spec: spec.path.stem)
def test_every_shipped_line_maps_to_where_it_was_written(spec: Spec) -> None:
    for candidate in (spec.default, spec.oracle):
        source = render(spec.family, candidate, next(iter(spec.layouts.values())))
        file, number, compared = "", 0, 0
        for line in source.mapped_text.splitlines():
            directive = re.fullmatch(r'#line (\d+) "templates/(.*)"', line)
            if directive:
                number, file = int(directive[1]), directive[2]
                continue
            if file:
                written = [*(TEMPLATES / file).read_text().splitlines(), ""][number - 1].rstrip()
                assert line == written or "${" in written, f"{file}:{number}"
                compared += 1
                number += 1
        assert compared > 100


@pytest.mark.parametrize("spec", SHIPPED, ids=lambda spec: spec.path.stem)
def test_layouts_share_sources_that_differ_at_run_time_only(spec: Spec) -> None:
    constants = {tuple(layout[name] for name in spec.family.layout_constants) for layout in spec.layouts.values()}
    sources = {render(spec.family, spec.default, layout).sha256 for layout in spec.layouts.values()}
    assert len(sources) == len(constants)
