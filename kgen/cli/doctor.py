"""``kgen doctor``: what this machine has, and what each missing thing costs."""

from __future__ import annotations

import typer

from kgen.cli.console import JsonFlag, write_json, write_table


def doctor(json: JsonFlag = False) -> None:
    """Say what this machine has, and what it lacks.

    Looks for a C++ compiler, every nvcc (machine and wheels; which one is used, its version, which architectures it
    builds), ninja, the emulator, the CUDA driver, GPUs, torch and cuda-bindings, and says what each missing thing
    costs. Exits 1 where there is no C++ compiler, since nothing can be compiled then.

    \b
    Examples:
      kgen doctor
      kgen doctor --json
      KGEN_NVCC=/usr/local/cuda-13.0/bin/nvcc kgen doctor

    Results go to stdout.
    """
    from kgen.doctor import examine

    findings = examine()
    if json:
        write_json({"findings": findings})
    else:
        rows = [(item.status, item.name, item.found) for item in findings]
        write_table(["status", "part", "found"], rows)
        for item in findings:
            if item.remedy:
                typer.echo(f"{item.name}: {item.remedy}")
    if any(item.name == "C++ compiler" and item.status == "missing" for item in findings):
        raise typer.Exit(1)
