"""One tuning run from its options to its report."""

from __future__ import annotations

import time
import uuid
from contextlib import ExitStack
from itertools import product

from kgen.build.toolchain import find_toolchain
from kgen.db import TuningDatabase
from kgen.device import Device
from kgen.device.cuda_driver import device_count
from kgen.errors import DeviceError, InputError
from kgen.measure import DeviceEvaluator
from kgen.space import check_candidate, enumerate_space
from kgen.tune.device_trials import DeviceTrials
from kgen.tune.evaluate import Evaluator, ModelEvaluator, Study, floors_us
from kgen.tune.report import Listener, TuneOptions, TuneReport
from kgen.tune.run import Run


def tune(options: TuneOptions, listener: Listener) -> TuneReport:
    """Tune every layout of the options and report their winners.

    KeyboardInterrupt ends the run early with ``interrupted`` in the report. Raises InputError for unknown names,
    numbers out of range and candidates that do not fit, ToolchainError where nothing compiles for the target,
    DeviceError where the device is missing or degraded; all trials made until then are kept.
    """
    started = time.monotonic()
    spec, target = options.spec, options.spec.target(options.target)
    envelope = spec.target(options.envelope or options.target)
    layouts = _layouts(options)
    spaces = {name: enumerate_space(spec, name, envelope) for name in layouts}
    for name, candidate in product(layouts, options.tries):
        check_candidate(spec, candidate, name, envelope)
    with ExitStack() as stack:
        database = stack.enter_context(TuningDatabase.open(options.db))
        device_arch, why = _choose_device(options)
        study = Study(
            spec=spec,
            target=target,
            envelope=envelope,
            toolchain=find_toolchain(device_arch or target.nvcc_arch),
            cache_dir=options.cache_dir,
            jobs=options.jobs,
            seed=options.seed,
            run_id=uuid.uuid4().hex,
        )
        evaluator = _make_evaluator(study, device_arch, stack)
        run = Run(study, evaluator, database, listener)
        spaces = run.without_rejected(spaces, options.tries)
        trials = sum(min(options.trials, len(space.candidates)) + 1 for space in spaces.values())
        listener.started(trials, evaluator.name, why)
        interrupted, spent = run.search_and_settle(spaces, options, started)
        report = TuneReport(
            target=target.name,
            envelope=envelope.name,
            evaluator=evaluator.name,
            why=why,
            winners=tuple(winner for name in layouts for winner in run.winners(name) if winner.checked_on),
            floors_us={name: floors_us(study, spec.layout(name)) for name in layouts},
            default_us={name: run.default_us(name) for name in layouts},
            statuses=dict(sorted(run.statuses.items())),
            new_trials=run.new_trials,
            interrupted=interrupted,
            budget_spent=spent,
            wall_s=time.monotonic() - started,
        )
    listener.finished(report)
    return report


def _layouts(options: TuneOptions) -> list[str]:
    """The layouts to tune, checked; InputError also for numbers out of range."""
    for flag, number in (("--trials", options.trials), ("--jobs", options.jobs), ("--proofs", options.proofs)):
        if number < 1:
            raise InputError(flag, "must be at least 1", seen=str(number))
    if options.seed < 0:
        raise InputError("--seed", "must not be negative", seen=str(options.seed))
    if options.time_budget_s is not None and options.time_budget_s <= 0:
        raise InputError("--time-budget", "must be more than nothing", seen=f"{options.time_budget_s:g} s")
    names = list(dict.fromkeys(options.layouts or options.spec.layouts))
    return [name for name in names if options.spec.layout(name)]


def _choose_device(options: TuneOptions) -> tuple[str | None, str]:
    """The architecture of the GPU to time on, or None for the model, and why."""
    if options.evaluator == "model":
        return None, "asked for: nothing is timed, results are modelled"
    target = options.spec.target(options.target)
    try:
        found = device_count()
    except DeviceError as error:
        found, missing = 0, str(error)
    else:
        missing = "no GPU here"
    if not found:
        if options.evaluator == "device":
            raise DeviceError("--evaluator device", "no usable GPU", seen=missing, remedy="run kgen doctor")
        return None, f"{missing}: results are modelled"
    device = Device.open()
    arch = device.arch
    device.close()
    if arch == target.nvcc_arch:
        return arch, f"a GPU of {arch} is here: results are measured"
    limits = options.envelope or options.target
    return arch, f"a GPU of {arch} is here, not {target.nvcc_arch}: results are a proxy inside the limits of {limits}"


def _make_evaluator(study: Study, device_arch: str | None, stack: ExitStack) -> Evaluator:
    if device_arch is None:
        return ModelEvaluator(study)
    own = next((target for target in study.spec.targets.values() if target.nvcc_arch == device_arch), None)
    if own is None:
        remedy = "add the target to the spec, or use --evaluator model"
        raise InputError(study.spec.label, "has no target of the GPU's architecture", seen=device_arch, remedy=remedy)
    envelope = None if study.envelope == own else study.envelope
    measure = stack.enter_context(DeviceEvaluator(own, envelope))
    return DeviceTrials(study, measure, own)
