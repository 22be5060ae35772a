"""The search over layouts and candidates, with the database as its memory."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from kgen.canonical import canonical_json
from kgen.db import TuningDatabase
from kgen.db.winners import Winner, device_key, winners
from kgen.evaluate import Evaluator, Study, Variant, score
from kgen.family import Candidate
from kgen.prove import Proof, SourceKey, prove, proven_trial
from kgen.records import PROTOCOL_VERSION, TrialRecord
from kgen.render import Source, render
from kgen.sampler import make_sampler
from kgen.space import Space, candidate_key
from kgen.tune.report import Listener, TuneOptions

BATCH = 8
"""Candidates asked for at once. Fixed, so that the number of jobs does not change what is asked next."""


@dataclass(frozen=True)
class _Memory:
    """What the database knew of this study when the run began, and what the run added, by layout and candidate."""

    judged: dict[tuple[str, str, str], TrialRecord]
    checked: dict[tuple[str, str, str], int]
    proofs: dict[SourceKey, Proof]

    def note(self, layout_name: str, record: TrialRecord) -> None:
        key = (layout_name, candidate_key(record.candidate), record.source_sha256)
        if record.evaluator == "model" and record.checked_on:
            proof = Proof(record.status == "ok", record.relative_error, record.reason)
            self.proofs[layout_name, record.source_sha256] = proof
        elif record.status != "device_degraded":
            self.judged.setdefault(key, record)
        if record.checked_on:
            self.checked[key] = self.checked.get(key, 0) + 1


class Run:
    """One run over all layouts."""

    def __init__(self, study: Study, evaluator: Evaluator, database: TuningDatabase, listener: Listener) -> None:
        self._study, self._evaluator, self._database, self._listener = study, evaluator, database, listener
        self._sources: dict[bytes, Source] = {}
        self._memory = _Memory({}, {}, {})
        self._variants: dict[tuple[str, str], Variant] = {}
        self.statuses: Counter[str] = Counter()
        self.new_trials = 0
        self._remember()

    def search_and_settle(self, spaces: Mapping[str, Space], options: TuneOptions, started: float) -> tuple[bool, bool]:
        """Search each layout in its share of the time, then settle the winners.

        Returns whether it was interrupted, and whether the time ran out.
        """
        spent = False
        try:
            for index, (name, space) in enumerate(spaces.items()):
                self._listener.phase(f"trying candidates for {name}")
                deadline = None
                if options.time_budget_s is not None:
                    left_s = started + options.time_budget_s - time.monotonic()
                    deadline = time.monotonic() + left_s / (len(spaces) - index)
                spent |= self._search(name, space, options.trials, deadline)
            if self._evaluator.name == "device":
                for name in spaces:
                    self._measure_finalists(name)
            else:
                self._prove_winners(list(spaces))
        except KeyboardInterrupt:
            return True, spent
        return False, spent

    def winners(self, layout_name: str) -> list[Winner]:
        """The winners of a layout among the sources that render today."""
        found = {variant.source.sha256 for (name, _), variant in self._variants.items() if name == layout_name}
        return winners(
            self._database,
            family=self._study.family.name,
            target=self._study.target.name,
            layout=self._study.spec.layout(layout_name),
            arch=self._study.target.nvcc_arch,
            sources=found,
        )

    def _remember(self) -> None:
        study = self._study
        names = {canonical_json(dict(layout)): name for name, layout in study.spec.layouts.items()}
        points = [canonical_json(dict(point)) for point in study.points]
        for record in self._database.trials(
            family=study.family.name,
            target=study.target.name,
            envelope=study.envelope.name,
            arch=self._evaluator.arch,
            evaluator=self._evaluator.name,
            toolchain=study.toolchain.fingerprint,
            protocol_version=PROTOCOL_VERSION,
        ):
            name = names.get(canonical_json(dict(record.layout)))
            same_device = device_key(record.device) == device_key(self._evaluator.device)
            same_points = record.status != "ok" or [canonical_json(time.point) for time in record.times] == points
            if name is not None and same_device and same_points:
                self._memory.note(name, record)

    def _search(self, layout_name: str, space: Space, trials: int, deadline: float | None) -> bool:
        """Try candidates until there are enough, or no time is left (then True)."""
        study = self._study
        sampler = make_sampler(space, study.spec.default, trials=trials, seed=study.seed)
        self._judge([self._variant(layout_name, study.spec.oracle, trials)])
        done = 0
        while done < trials and (proposals := sampler.ask(min(BATCH, trials - done))):
            if done and deadline is not None and time.monotonic() > deadline:
                return True
            variants = [
                self._variant(layout_name, proposal.candidate, done + index) for index, proposal in enumerate(proposals)
            ]
            for proposal, record in zip(proposals, self._judge(variants), strict=True):
                sampler.tell(proposal, score(study, record))
            done += len(proposals)
        return False

    def _variant(self, layout_name: str, candidate: Candidate, number: int) -> Variant:
        layout = self._study.spec.layout(layout_name)
        family = self._study.family
        key = canonical_json([family.label(candidate), family.constants(candidate, layout)])
        if key not in self._sources:
            self._sources[key] = render(family, candidate, layout)
        variant = Variant(number, layout_name, layout, candidate, self._sources[key])
        return self._variants.setdefault((layout_name, candidate_key(candidate)), variant)

    def _judge(self, variants: Sequence[Variant]) -> list[TrialRecord]:
        """The variants' trials in order: found in the database, else made and recorded one by one."""
        missing = [variant for variant in variants if _key(variant) not in self._memory.judged]
        for variant, record in zip(missing, self._evaluator.evaluate(missing) if missing else (), strict=True):
            self._record(variant.layout_name, record)
            self._memory.judged.setdefault(_key(variant), record)
        records = [self._memory.judged[_key(variant)] for variant in variants]
        for record in records:
            self.statuses[record.status] += 1
            self._listener.trial_done(record)
        return records

    def _record(self, layout_name: str, record: TrialRecord) -> None:
        self._database.add_trial(record)
        self._memory.note(layout_name, record)
        self.new_trials += 1

    def _prove_winners(self, layout_names: Sequence[str]) -> None:
        """Prove winners, defaults and oracles; where a winner is wrong, the next best is proven in its place."""
        self._listener.phase("proving winners in the emulator")
        while unproven := [variant for name in layout_names for variant in self._unproven(name)]:
            to_prove: dict[SourceKey, tuple[Variant, int]] = {}
            for variant in unproven:
                place = variant.layout_name, variant.source.sha256
                if place not in self._memory.proofs:
                    resident = self._memory.judged[_key(variant)].blocks_per_sm or 1
                    to_prove.setdefault(place, (variant, resident))
            waiting = [variant for variant in unproven if _place(variant) not in to_prove]
            self._keep_proofs(waiting)

            def keep(place: SourceKey, proof: Proof, unproven: Sequence[Variant] = unproven) -> None:
                self._memory.proofs[place] = proof
                self._keep_proofs([variant for variant in unproven if _place(variant) == place])

            if to_prove:
                prove(self._study, to_prove, keep)

    def _unproven(self, layout_name: str) -> Iterator[Variant]:
        """Variants of a layout that need a proof of their own in the database: default, oracle, and winners."""
        spec = self._study.spec
        candidates = {candidate_key(item): item for item in (spec.default, spec.oracle)}
        candidates |= {winner.candidate_key: winner.candidate for winner in self.winners(layout_name)}
        for candidate in {candidate_key(item): item for item in candidates.values()}.values():
            variant = self._variants.get((layout_name, candidate_key(candidate)))
            if variant is None or self._memory.checked.get(_key(variant)):
                continue
            if self._memory.judged[_key(variant)].status == "ok":
                yield variant

    def _keep_proofs(self, variants: Sequence[Variant]) -> None:
        for variant in variants:
            trial = replace(self._memory.judged[_key(variant)], run_id=self._study.run_id, number=variant.number)
            self._record(variant.layout_name, proven_trial(trial, self._memory.proofs[_place(variant)]))

    def _measure_finalists(self, layout_name: str) -> None:
        """Time the winners, the incumbents and the default side by side, unless all of them were already."""
        self._listener.phase(f"measuring finalists for {layout_name}")
        spec = self._study.spec
        names = {winner.candidate_key: winner.candidate for winner in self.winners(layout_name)}
        names.setdefault(candidate_key(spec.default), spec.default)
        found = [self._variants.get((layout_name, candidate_key(candidate))) for candidate in names.values()]
        right = [variant for variant in found if variant and self._memory.judged[_key(variant)].status == "ok"]
        if all(self._memory.checked.get(_key(variant), 0) >= 2 for variant in right):
            return
        for record in self._evaluator.finish(right):
            self._record(layout_name, record)


def _key(variant: Variant) -> tuple[str, str, str]:
    return variant.layout_name, candidate_key(variant.candidate), variant.source.sha256


def _place(variant: Variant) -> SourceKey:
    return variant.layout_name, variant.source.sha256
