"""Builds: what is compiled, what is trusted, what is reported."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kgen import build as build_module
from kgen.build import BuildResult, EntryResources, build, build_each, build_key, ninja_run, parse_resources
from kgen.build.toolchain import Toolchain, find_toolchain
from kgen.errors import BuildError, ToolchainError

ARCH = "sm_120"
INTERNAL = """\
namespace { __device__ int hidden[4]; }
static __device__ __noinline__ int twice(int i) { return 2 * hidden[i]; }
extern "C" __global__ void lookup(int* y) { __shared__ int s[16]; s[*y & 15] = twice(*y); __syncthreads(); *y = s[3]; }
"""


@dataclass(frozen=True)
class Source:
    """The attributes of kgen.render.Source."""

    family: str
    name: str
    text: str
    mapped_text: str
    sha256: str
    entries: tuple[str, ...]


def make_source(text: str, name: str = "probe") -> Any:
    return Source(name, name, text, text, hashlib.sha256(text.encode()).hexdigest(), ("probe",))


def kernel(value: int) -> Any:
    return make_source(f'extern "C" __global__ void probe(int* x) {{ *x = {value}; }}\n')


@pytest.fixture(scope="module")
def toolchain() -> Toolchain:
    return find_toolchain(ARCH)


def fake_nvcc(toolchain: Toolchain, folder: Path, script: str) -> Toolchain:
    """A toolchain whose nvcc is a shell script; it is told where the artefact goes as $out."""
    path = folder / "nvcc"
    head = '#!/bin/sh\nwhile [ $# -gt 1 ]; do [ "$1" = -o ] && out="$2"; shift; done\n'
    path.write_text(head + textwrap.dedent(script))
    path.chmod(0o755)
    return replace(toolchain, nvcc=path)


Builder = Callable[..., list[BuildResult]]


@pytest.fixture
def run(toolchain: Toolchain, tmp_path: Path) -> Builder:
    def build_here(*sources: Any, **changed: Any) -> list[BuildResult]:
        options: dict[str, Any] = {
            "arch": ARCH,
            "toolchain": toolchain,
            "cache_dir": tmp_path / "cache",
            "jobs": 2,
            "timeout_s": 60.0,
        }
        return build(sources, **{**options, **changed})

    return build_here


@pytest.fixture
def no_ninja(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def forbid() -> None:
        monkeypatch.setattr(ninja_run, "ninja_path", lambda: pytest.fail("ninja was started"))

    return forbid


def test_order_is_kept_and_equal_sources_are_compiled_once(run: Builder) -> None:
    results = run(kernel(2), kernel(1), kernel(2))
    assert [result.source for result in results] == [kernel(2), kernel(1), kernel(2)]
    assert results[0] == results[2]
    assert all(result.status == "ok" and not result.cached and result.reason == "" for result in results)
    for result in results:
        assert result.path is not None
        assert hashlib.sha256(result.path.read_bytes()).hexdigest() == result.sha256
        assert result.path.read_bytes()[:4] == b"\x7fELF"


def test_layout_of_an_entry(run: Builder, toolchain: Toolchain, tmp_path: Path) -> None:
    (result,) = run(kernel(1))
    assert result.key == build_key(kernel(1), arch=ARCH, toolchain=toolchain)
    entry = tmp_path / "cache" / result.key[:2] / result.key
    assert result.path == entry / "kernel.cubin"
    assert (entry / "source.cu").read_text() == kernel(1).text
    assert sorted(path.name for path in entry.iterdir()) == ["kernel.cubin", "lock", "result.json", "source.cu"]
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [result.key[:2]]


def test_second_run_starts_no_ninja(run: Builder, no_ninja: Callable[[], None]) -> None:
    bad = make_source("int x = nowhere;\n")
    first = run(kernel(1), bad)
    no_ninja()
    assert run(kernel(1), bad) == [replace(result, cached=True) for result in first]


def truncate(entry: Path) -> None:
    path = entry / "kernel.cubin"
    path.write_bytes(path.read_bytes()[:-1])


def flip_a_bit(entry: Path) -> None:
    content = bytearray((entry / "kernel.cubin").read_bytes())
    content[len(content) // 2] ^= 1
    (entry / "kernel.cubin").write_bytes(content)


def cut_json(entry: Path) -> None:
    text = (entry / "result.json").read_text()
    (entry / "result.json").write_text(text[: len(text) // 2])


def change_json(field: str, value: object) -> Callable[[Path], None]:
    def change(entry: Path) -> None:
        result = json.loads((entry / "result.json").read_text())
        assert result[field] != value
        (entry / "result.json").write_text(json.dumps({**result, field: value}))

    change.__name__ = f"other_{field}"
    return change


DAMAGES = [
    truncate,
    flip_a_bit,
    cut_json,
    change_json("schema", 0),
    change_json("key", "0" * 64),
    change_json("sha256", "0" * 64),
    lambda entry: (entry / "result.json").write_text("[]"),
    lambda entry: (entry / "result.json").unlink(),
    lambda entry: (entry / "kernel.cubin").unlink(),
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_entry_is_built_again(
    run: Builder, toolchain: Toolchain, damage: Callable[[Path], None], tmp_path: Path
) -> None:
    tools = fake_nvcc(toolchain, tmp_path, 'cat > "$out"\n')
    (first,) = run(kernel(1), toolchain=tools)
    damage(tmp_path / "cache" / first.key[:2] / first.key)
    (second,) = run(kernel(1), toolchain=tools)
    assert not second.cached
    assert second.sha256 == first.sha256
    assert second.path is not None
    assert second.path.read_text() == kernel(1).text
    assert run(kernel(1), toolchain=tools)[0].cached


def test_left_overs_of_a_killed_compile_are_removed(run: Builder, toolchain: Toolchain, tmp_path: Path) -> None:
    key = build_key(kernel(1), arch=ARCH, toolchain=toolchain)
    entry = tmp_path / "cache" / key[:2] / key
    (entry / "attempt.dead").mkdir(parents=True)
    (entry / "attempt.dead" / "kernel.cubin").write_bytes(b"half")
    (entry / "kernel.cubin").write_bytes(b"an artefact without a result")
    (result,) = run(kernel(1))
    assert (result.status, result.cached) == ("ok", False)
    assert not (entry / "attempt.dead").exists()


def test_key_covers_source_arch_and_toolchain(toolchain: Toolchain) -> None:
    def key(source: Any, arch: str, tools: Toolchain) -> str:
        return build_key(source, arch=arch, toolchain=tools)

    other_nvcc = replace(toolchain, nvcc_version="13.1.0")
    other_host = replace(toolchain, host_version="g++ 14.1.0")
    moved = replace(toolchain, nvcc=Path("/elsewhere/nvcc"), host_compiler=Path("/elsewhere/g++"), origin="wheel")
    base = key(kernel(1), ARCH, toolchain)
    assert base == key(kernel(1), ARCH, moved) == key(replace(kernel(1), mapped_text="other"), ARCH, toolchain)
    others = [
        key(kernel(2), ARCH, toolchain),
        key(kernel(1), "sm_90", toolchain),
        key(kernel(1), ARCH, other_nvcc),
        key(kernel(1), ARCH, other_host),
    ]
    assert len({base, *others}) == 5


def test_cubin_does_not_depend_on_the_folder(run: Builder, tmp_path: Path) -> None:
    """nvcc hashes a source file's path into internal symbols; INTERNAL has some, and the planted bug shows it."""
    source = make_source(INTERNAL)
    mapped = replace(source, mapped_text='#line 7 "templates/lookup.cu.j2"\n' + INTERNAL)
    (here,) = run(source)
    (there,) = run(mapped, cache_dir=tmp_path / "another" / "cache")
    assert here.status == there.status == "ok"
    assert here.sha256 == there.sha256
    assert here.path is not None
    assert b"_INTERNAL_" in here.path.read_bytes()
    assert str(tmp_path).encode() not in here.path.read_bytes()


def test_a_source_file_instead_of_the_pipe_would_leak_its_path(
    run: Builder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(build_module, "STDIN", "../source.cu")
    source = make_source(INTERNAL)
    (here,), (there,) = run(source), run(source, cache_dir=tmp_path / "another" / "cache")
    assert here.status == there.status == "ok"
    assert here.sha256 != there.sha256


def test_compile_error_names_the_template_line(run: Builder) -> None:
    source = make_source("int x = nowhere;\n")
    mapped = replace(source, mapped_text='#line 41 "templates/verify.cu.j2"\n' + source.text)
    bad, good = run(mapped, kernel(1))
    assert (bad.status, bad.path, bad.sha256, bad.resources) == ("compile_error", None, "", {})
    assert bad.reason == 'templates/verify.cu.j2(41): error: identifier "nowhere" is undefined'
    assert good.status == "ok"


def test_ptxas_error_is_the_reason(run: Builder) -> None:
    text = 'extern "C" __global__ void probe(int* x) { __shared__ int s[20000]; s[*x] = 1; *x = s[0]; }\n'
    (result,) = run(make_source(text))
    assert result.status == "compile_error"
    assert "uses too much shared data" in result.reason


HANDS_ON = """\
extern "C" __global__ void %s probe(int* x) { asm volatile("setmaxnreg.dec.sync.aligned.u32 24;"); *x = 1; }
"""


@pytest.mark.parametrize("arch", ["sm_90", "sm_120"])
def test_registers_are_handed_on_and_where_ptxas_would_not_the_build_fails(run: Builder, arch: str) -> None:
    hands_on, keeps = run(make_source(HANDS_ON % "__launch_bounds__(384, 1)"), make_source(HANDS_ON % ""), arch=arch)
    assert (hands_on.status, hands_on.resources["probe"].registers) == ("ok", 168)
    assert (keeps.status, keeps.path, keeps.sha256, keeps.resources) == ("compile_error", None, "", {})
    assert keeps.reason == (
        "warps would wait for ever for registers that others keep: ptxas info    : (C7508) Potential Performance Loss: "
        "'setmaxnreg' ignored; unable to determine register count at entry."
    )


def test_a_build_whose_registers_stay_is_refused_from_the_cache_too(
    run: Builder, toolchain: Toolchain, tmp_path: Path
) -> None:
    said = "ptxas info : (C7508) 'setmaxnreg' ignored to maintain minimum register requirements."
    tools = fake_nvcc(toolchain, tmp_path, f'printf artefact > "$out"; echo "{said}"; echo "Used 8 registers"\n')
    for cached in (False, True):
        (result,) = run(kernel(1), toolchain=tools)
        assert (result.status, result.path, result.sha256, result.cached) == ("compile_error", None, "", cached)
        assert result.reason == f"warps would wait for ever for registers that others keep: {said}"


@pytest.mark.parametrize(
    ("arch", "built"),
    [
        ("sm_89", "sm_89"),
        ("sm_90", "sm_90a"),
        ("sm_90a", "sm_90a"),
        ("sm_100", "sm_100f"),
        ("sm_120", "sm_120f"),
        ("sm_120a", "sm_120a"),
        ("sm_121", "sm_121f"),
    ],
)
def test_what_only_a_family_has_is_asked_for(
    run: Builder, toolchain: Toolchain, tmp_path: Path, arch: str, built: str
) -> None:
    tools = fake_nvcc(toolchain, tmp_path, "tr '\\0' '\\n' < /proc/$$/cmdline > \"$out\"\n")
    (result,) = run(kernel(1), toolchain=tools, arch=arch)
    assert result.path is not None
    assert [word for word in result.path.read_text().splitlines() if "arch" in word] == [f"-arch={built}"]
    assert result.arch == arch


def test_the_key_covers_what_is_asked_for(toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch) -> None:
    archs = ["sm_89", "sm_90", "sm_120", "emulator"]
    before = [build_key(kernel(1), arch=arch, toolchain=toolchain) for arch in archs]
    monkeypatch.setattr(build_module, "_with_features", lambda arch: arch)
    after = [build_key(kernel(1), arch=arch, toolchain=toolchain) for arch in archs]
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, False, False, True]


def test_time_limit_kills_the_process_group_and_is_not_remembered(
    run: Builder, toolchain: Toolchain, tmp_path: Path
) -> None:
    slow = fake_nvcc(toolchain, tmp_path, f"sleep 60 & echo $! > {tmp_path}/pid\nwait\n")
    (result,) = run(kernel(1), toolchain=slow, timeout_s=0.5)
    assert (result.status, result.path) == ("compile_timeout", None)
    assert result.reason.startswith("compiler stopped after")
    assert wait_until(lambda: not is_running(int((tmp_path / "pid").read_text())))
    (again,) = run(kernel(1))
    assert (again.status, again.cached) == ("ok", False)


def test_killed_compiler_is_not_remembered(run: Builder, toolchain: Toolchain, tmp_path: Path) -> None:
    killed = fake_nvcc(
        toolchain, tmp_path, "echo \"nvcc error   : 'cicc' died due to signal 9 (Kill signal)\"; exit 9\n"
    )
    (first,) = run(kernel(1), toolchain=killed)
    reason = "the machine killed the compiler: nvcc error   : 'cicc' died due to signal 9 (Kill signal)"
    assert (first.status, first.reason, first.stopped) == ("compile_killed", reason, True)
    assert run(kernel(1))[0].status == "ok"


def test_kill_9_half_way_leaves_nothing_that_is_trusted(run: Builder, toolchain: Toolchain, tmp_path: Path) -> None:
    half = fake_nvcc(
        toolchain, tmp_path, f'printf half > "$out"; echo $$ >> {tmp_path}/pids; sleep 60; printf whole > "$out"\n'
    )
    process = start_build(tmp_path / "cache", half, "[kernel(1), kernel(2)]")
    pids = tmp_path / "pids"
    assert wait_until(lambda: pids.exists() and pids.read_text() != "")
    process.kill()
    process.wait()
    compiler = int(pids.read_text().split()[0])
    os.killpg(compiler, signal.SIGKILL)
    assert wait_until(lambda: not is_running(compiler))
    results = run(kernel(1), kernel(2))
    assert [(result.status, result.cached) for result in results] == [("ok", False)] * 2
    assert all(result.path is not None and result.path.read_bytes()[:4] == b"\x7fELF" for result in results)


def each(toolchain: Toolchain, folder: Path, *sources: Any) -> Generator[BuildResult]:
    return build_each(sources, arch=ARCH, toolchain=toolchain, cache_dir=folder / "cache", jobs=2)


def test_each_result_comes_as_soon_as_it_is_there(toolchain: Toolchain, tmp_path: Path) -> None:
    script = f'if grep -q "= 2;"; then while [ ! -e {tmp_path}/go ]; do sleep 0.02; done; fi; printf ok > "$out"\n'
    tools = fake_nvcc(toolchain, tmp_path, script)
    results = each(tools, tmp_path, kernel(2), kernel(1), kernel(1))
    assert next(results).source == kernel(1), "while the other still compiles"
    (tmp_path / "go").touch()
    assert [result.source for result in results] == [kernel(2)]
    again = list(each(tools, tmp_path, kernel(3), kernel(2)))
    assert [(result.source, result.cached) for result in again] == [(kernel(2), True), (kernel(3), False)]


@pytest.mark.parametrize("where", ["in the build", "between results"])
def test_interrupt_kills_the_compilers_and_keeps_what_is_done(
    run: Builder, toolchain: Toolchain, tmp_path: Path, where: str
) -> None:
    script = f'if grep -q "= 1;"; then printf ok > "$out"; else echo $$ > {tmp_path}/pid; sleep 60; fi\n'
    tools = fake_nvcc(toolchain, tmp_path, script)

    def interrupted() -> None:
        with closing(each(tools, tmp_path, kernel(1), kernel(2))) as results:
            assert next(results).source == kernel(1)
            assert wait_until((tmp_path / "pid").exists)
            if where == "between results":
                raise KeyboardInterrupt
            os.kill(os.getpid(), signal.SIGINT)
            next(results)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert wait_until(lambda: not is_running(int((tmp_path / "pid").read_text())))
    assert not list((tmp_path / "cache").glob("run.*"))
    assert [result.cached for result in run(kernel(1), toolchain=tools)] == [True]


def test_two_processes_build_the_same_thing_once(toolchain: Toolchain, tmp_path: Path) -> None:
    slow = fake_nvcc(toolchain, tmp_path, f'echo x >> {tmp_path}/calls; sleep 0.4; printf artefact > "$out"\n')
    processes = [start_build(tmp_path / "cache", slow, "[kernel(1)]") for _ in range(2)]
    assert [process.communicate()[0] for process in processes] == ["ok artefact\n"] * 2
    assert (tmp_path / "calls").read_text() == "x\n"


def test_full_disk_is_named(run: Builder, toolchain: Toolchain, tmp_path: Path) -> None:
    full = fake_nvcc(toolchain, tmp_path, 'echo "fatal error: error writing to x: No space left on device"; exit 1\n')
    with pytest.raises(BuildError, match="cannot be written, no space left on device; free space there"):
        run(kernel(1), toolchain=full)
    assert run(kernel(1))[0].status == "ok"


def test_entry_that_cannot_be_written_is_named(run: Builder, toolchain: Toolchain, tmp_path: Path) -> None:
    key = build_key(kernel(1), arch=ARCH, toolchain=toolchain)
    (tmp_path / "cache" / key[:2] / key / "lock").mkdir(parents=True)
    with pytest.raises(BuildError, match="cache: the build cache cannot be written, is a directory; free space there"):
        run(kernel(1))


def test_cache_that_cannot_be_made_is_named(run: Builder, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match="file/cache: the build cache cannot be written, not a directory"):
        run(kernel(1), cache_dir=tmp_path / "file" / "cache")


def test_cached_results_need_no_write_access(run: Builder, tmp_path: Path, no_ninja: Callable[[], None]) -> None:
    run(kernel(1))
    no_ninja()
    folders = [path for path in [tmp_path / "cache", *(tmp_path / "cache").rglob("*")] if path.is_dir()]
    for folder in folders:
        folder.chmod(0o500)
    try:
        assert run(kernel(1))[0].cached
    finally:
        for folder in folders:
            folder.chmod(0o700)


def test_no_nvcc_and_old_nvcc_are_named(run: Builder, toolchain: Toolchain) -> None:
    with pytest.raises(ToolchainError, match=r"nvcc: not found, needed for sm_120; pip install 'kgen\[nvcc\]'"):
        run(kernel(1), toolchain=replace(toolchain, nvcc=None, archs=()))
    old = replace(toolchain, nvcc_version="12.4.131 (compiler.1_0)", archs=("sm_80", "sm_90"))
    with pytest.raises(ToolchainError, match=r"nvcc 12\.4\.131 at .* cannot build sm_120 \(needs 12\.9\)"):
        run(kernel(1), toolchain=old)


def test_environment_cannot_change_a_build(run: Builder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (plain,) = run(kernel(1))
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-lineinfo")
    (again,) = run(kernel(1), cache_dir=tmp_path / "another")
    assert again.sha256 == plain.sha256


def test_resources_of_every_entry(run: Builder) -> None:
    text = """
    extern "C" __global__ void first(float* x) { __shared__ float s[64]; s[threadIdx.x & 63] = *x; __syncthreads();
        *x = s[1]; }
    extern "C" __global__ void __launch_bounds__(1024) second(volatile float* x, int n) {
        float a[96];
        #pragma unroll
        for (int i = 0; i < 96; ++i) a[i] = x[i * n];
        #pragma unroll
        for (int i = 0; i < 96; ++i) x[i] = a[i] + 3 * a[95 - i]; }
    """
    (result,) = run(make_source(text))
    assert set(result.resources) == {"first", "second"}
    first, second = result.resources["first"], result.resources["second"]
    assert (first.static_shared_bytes, first.stack_bytes, first.spill_store_bytes) == (256, 0, 0)
    assert 1 <= first.registers <= 32
    assert (second.registers, second.static_shared_bytes) == (64, 0)
    assert second.spill_store_bytes > 0
    assert second.spill_load_bytes > 0


def test_parse_resources_exactly() -> None:
    log = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'combine' for 'sm_120'
ptxas info    : Function properties for combine
    8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 8 bytes cumulative stack size, 1024 bytes smem, 368 bytes cmem[0]
ptxas info    : Compile time = 2.4 ms
ptxas info    : Compiling entry function 'verify' for 'sm_120'
ptxas info    : Function properties for verify
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 9 barriers
"""
    assert parse_resources(log) == {
        "combine": EntryResources(40, 1024, 8, 12, 16),
        "verify": EntryResources(168, 0, 0, 0, 0),
    }
    assert parse_resources("") == {}


@pytest.fixture
def emulator(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A tiny emulator: its flags and one header; returns the include folder."""
    include = tmp_path / "include"
    (include / "kgen_emulator").mkdir(parents=True)
    (include / "kgen_emulator" / "value.hpp").write_text("#define VALUE 41\n")
    emulator: Any = SimpleNamespace(EMULATOR_FLAGS=("-shared", "-fPIC", "-O0", "-x", "c++"), EMULATOR_LIBRARIES=())
    monkeypatch.setitem(sys.modules, "kgen.emulator", emulator)
    monkeypatch.setattr(build_module, "INCLUDE", include)
    return include


def test_emulator_objects_depend_on_the_emulator_headers(run: Builder, emulator: Path) -> None:
    import ctypes

    source = make_source('#include <kgen_emulator/value.hpp>\nextern "C" int probe() { return VALUE + 1; }\n')
    host = find_toolchain("emulator")
    (first,) = run(source, arch="emulator", toolchain=host)
    assert first.path is not None
    assert (first.path.name, first.resources) == ("kernel.so", {})
    assert ctypes.CDLL(str(first.path)).probe() == 42
    assert run(source, arch="emulator", toolchain=host)[0].cached
    (emulator / "kgen_emulator" / "value.hpp").write_text("#define VALUE 6\n")
    (second,) = run(source, arch="emulator", toolchain=host)
    assert second.key != first.key
    assert second.path is not None
    assert ctypes.CDLL(str(second.path)).probe() == 7


def test_emulator_compile_error_names_the_line(run: Builder, emulator: Path) -> None:
    source = make_source("int x = nowhere;\n")
    mapped = replace(source, mapped_text='#line 41 "templates/verify.cu.j2"\n' + source.text)
    (result,) = run(mapped, arch="emulator", toolchain=find_toolchain("emulator"))
    assert result.reason.startswith("templates/verify.cu.j2:41:9: error:")


def start_build(cache_dir: Path, toolchain: Toolchain, sources: str) -> subprocess.Popen[str]:
    """Another process that builds ``sources``, one at a time, and prints the statuses and artefacts."""
    code = f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from pathlib import PosixPath
        from test_build import Toolchain, build, kernel
        options = dict(arch="sm_120", cache_dir={cache_dir!r}, jobs=1, timeout_s=60)
        for result in build({sources}, toolchain={toolchain!r}, **options):
            print(result.status, result.path.read_text())
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent.parent)


def wait_until(condition: Callable[[], bool], limit_s: float = 15) -> bool:
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
