"""What a cubin's machine code is made of: nvdisasm's listing, its hot loop, and the mix of instructions in it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kgen.build.toolchain import DEFAULT_CUDA
from kgen.errors import ToolchainError

GET_NVDISASM = "pip install 'kgen[disasm]', or set KGEN_NVDISASM to the CUDA toolkit's nvdisasm"
MIX: Mapping[str, str] = {
    "mma": r"[HIQODF]G?MMA",
    "ldmatrix": r"LDSM|LDMATRIX",
    "shared": r"LDS|STS|STSM|ATOMS|REDS",
    "async copy": r"UBLKCP|UTMA\w*|LDGSTS",
    "global": r"LDG|STG|LD|ST|RED|REDG|ATOM|ATOMG",
    "local": r"LDL|STL",
    "constant": r"LDC|LDCU|ULDC",
    "sync": r"BAR|SYNCS|DEPBAR|LDGDEPBAR|WARPSYNC|MEMBAR|FENCE|NANOSLEEP|ARRIVES|ERRBAR|CCTL",
    "special": r"MUFU",
    "shuffle": r"SHFL|MOVM|VOTE|VOTEU|REDUX|MATCH",
    "float": r"F(ADD|MUL|FMA|MNMX\d?|SETP|SEL|CHK|SET)|H(ADD2|MUL2|FMA2|MNMX2|SETP2)|F2(FP?|I)|I2FP?|D(ADD|MUL|FMA)",
    "control": r"BRA|BRX|JMP|CALL|RET|EXIT|BSSY|BSYNC|BREAK|NOP|YIELD|ELECT|ACQBULK|PREEXIT",
}
"""Kinds of instructions by the pattern of their opcode, without modifiers; what is left is integer and moves."""
INTEGER = "integer"
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(@!?U?P\w+\s+)?(\w+)((?:\.\w+)*)([^;]*);")
_LABEL = re.compile(r"^(\.L_\w+):")
_ENTRY = re.compile(r"^\.text\.(\w+):")
_JUMP_TARGET = re.compile(r"`\((\.L_\w+)\)")
_LIMIT_S = 120


@dataclass(frozen=True)
class HotLoop:
    """The loop where a kernel spends its time, by kind of instruction; one warp executes each once a pass.

    It is the innermost loop with the most mma, or, in a kernel without any, the longest innermost one.
    """

    instructions: int
    mix: Mapping[str, int]


def find_nvdisasm(beside: Path | None = None) -> Path:
    """nvdisasm: $KGEN_NVDISASM, in the folder ``beside`` (nvcc's), on the PATH, in the toolkit, in a wheel.

    Raises ToolchainError where there is none.
    """
    named = os.environ.get("KGEN_NVDISASM")
    if named:
        found = shutil.which(named)
        if found is None:
            raise ToolchainError("KGEN_NVDISASM", "no such program", seen=repr(named), remedy="unset it or mend it")
        return Path(found)
    places = [str(beside)] if beside is not None else []
    places += [os.environ.get("PATH", ""), f"{DEFAULT_CUDA}/bin"]
    places += [str(path) for folder in sys.path for path in sorted((Path(folder) / "nvidia").glob("cu*/bin"))]
    found = shutil.which("nvdisasm", path=os.pathsep.join(places))
    if found is None:
        raise ToolchainError("nvdisasm", "not found", remedy=GET_NVDISASM)
    return Path(found)


def hot_loops(cubin: bytes, nvdisasm: Path) -> dict[str, HotLoop | None]:
    """The hot loop of every entry of a cubin; None for one without a loop. Raises ToolchainError if nvdisasm fails."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        try:
            done = subprocess.run(
                [str(nvdisasm), "-c", file.name], capture_output=True, text=True, check=False, timeout=_LIMIT_S
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ToolchainError(str(nvdisasm), "cannot be run", seen=str(error), remedy=GET_NVDISASM) from None
    if done.returncode:
        seen = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise ToolchainError(str(nvdisasm), "does not read the cubin", seen=seen, remedy=GET_NVDISASM)
    return {entry: _hot_loop(lines) for entry, lines in _entries(done.stdout).items()}


def _entries(listing: str) -> dict[str, list[str]]:
    """The lines of each entry's code."""
    entries: dict[str, list[str]] = {}
    for line in listing.splitlines():
        if match := _ENTRY.match(line):
            entries[match[1]] = []
        elif entries:
            entries[list(entries)[-1]].append(line)
    return entries


def _hot_loop(lines: Sequence[str]) -> HotLoop | None:
    code = _code(lines)
    loops = _loops(code)
    with_mma = [loop for loop in loops if any(code[place].kind == "mma" for place in loop)]
    chosen = with_mma or loops
    innermost = [loop for loop in chosen if not any(other < loop for other in chosen)]
    mixes = [Counter(code[place].kind for place in loop) for loop in innermost]
    if not mixes:
        return None
    best = max(mixes, key=lambda mix: (mix["mma"], mix.total()))
    return HotLoop(best.total(), {kind: best[kind] for kind in (*MIX, INTEGER) if best[kind]})


@dataclass(frozen=True)
class _Instruction:
    """Its kind, and the places where control may go from it."""

    kind: str
    after: tuple[int, ...]


def _code(lines: Sequence[str]) -> list[_Instruction]:
    labels: dict[str, int] = {}
    found: list[tuple[str, bool, str]] = []
    for line in lines:
        if label := _LABEL.match(line):
            labels[label[1]] = len(found)
        elif instruction := _INSTRUCTION.match(line):
            predicate, opcode, modifiers, operands = instruction.groups()
            on_divergence = ".DIV" in modifiers  # leads to code that is never hot
            jump = _JUMP_TARGET.search(operands) if opcode in ("BRA", "JMP") and not on_divergence else None
            # A uniform branch has its predicate among its operands.
            sure = not predicate and not on_divergence and not operands.strip().lstrip("!").startswith("UP")
            leaves = sure and opcode in ("BRA", "JMP", "BRX", "EXIT", "RET")
            found.append((_kind(opcode), not leaves, jump[1] if jump else ""))
    return [
        _Instruction(kind, (*((place + 1,) if goes_on else ()), *((labels[label],) if label in labels else ())))
        for place, (kind, goes_on, label) in enumerate(found)
    ]


def _loops(code: Sequence[_Instruction]) -> list[frozenset[int]]:
    """The natural loops: for each backward branch, its target and all that leads to the branch without passing it."""
    after = {place: item.after for place, item in enumerate(code)}
    before: dict[int, list[int]] = defaultdict(list)
    for place in _reached({0}, after):
        for target in after.get(place, ()):
            before[target].append(place)
    loops: dict[int, set[int]] = defaultdict(set)
    for header, sources in before.items():
        for source in sources:
            if header < source:
                loops[header] |= _reached({source}, before, {header})
    return [frozenset(body) for body in loops.values()]


def _reached(
    starts: set[int], edges: Mapping[int, Sequence[int]], ends: frozenset[int] | set[int] = frozenset()
) -> set[int]:
    """All places on the ways from ``starts``, which stop at ``ends``; these are included."""
    found, left = set(ends), list(starts)
    while left:
        place = left.pop()
        if place not in found:
            found.add(place)
            left += edges.get(place, ())
    return found


def _kind(opcode: str) -> str:
    return next((kind for kind, pattern in MIX.items() if re.fullmatch(pattern, opcode)), INTEGER)
