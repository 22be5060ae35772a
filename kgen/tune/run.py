"""The search over layouts and candidates, with the database as its memory."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kgen.canonical import canonical_json
from kgen.db import TuningDatabase
from kgen.db.reject import rejected, rejected_error
from kgen.db.winners import Winner, device_key, winners
from kgen.family import Candidate
from kgen.records import PROTOCOL_VERSION, TrialRecord
from kgen.render import Source, render
from kgen.space import Space, candidate_key
from kgen.tune.evaluate import Evaluator, Study, Variant, score
from kgen.tune.prove import Proof, SourceKey, choose_few, prove, proven_trial
from kgen.tune.report import Listener, TuneOptions
from kgen.tune.sampler import make_sampler

BATCH = 8
"""Candidates asked for at once. Fixed, so that the number of jobs does not change what is asked next."""

_OF_THE_MACHINE = ("device_degraded", "compile_timeout")
"""What says nothing of the candidate: the next run tries it again."""


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
        elif record.status not in _OF_THE_MACHINE:
            self.judged.setdefault(key, record)
        if record.checked_on:
            self.checked[key] = self.checked.get(key, 0) + 1


class Run:
    """One run over all layouts."""

    def __init__(self, study: Study, evaluator: Evaluator, database: TuningDatabase, listener: Listener) -> None:
        self._study, self._evaluator, self._database, self._listener = study, evaluator, database, listener
        self._sources: dict[bytes, Source] = {}
        self._memory = _Memory({}, {}, {})
        self._rejected = rejected(database)
        self._variants: dict[tuple[str, str], Variant] = {}
        self.statuses: Counter[str] = Counter()
        self.new_trials = 0
        self._proofs_done = self._proofs_due = 0
        self._remember()

    def without_rejected(self, spaces: Mapping[str, Space], tries: Sequence[Candidate]) -> dict[str, Space]:
        """The spaces by layout, without the candidates whose sources are rejected.

        Raises InputError where that is one which must be tried: the default, the oracle, or one of ``tries``.
        """
        if not self._rejected:
            return dict(spaces)
        spec, left = self._study.spec, {}
        for name, space in spaces.items():
            for candidate in (spec.default, spec.oracle, *tries):
                if rejection := self._rejected.get(self._rendered(name, candidate, 0).source.sha256):
                    raise rejected_error(f"candidate {candidate_key(candidate)} of {spec.label}", rejection)
            kept = [
                candidate
                for candidate in space.candidates
                if self._rendered(name, candidate, 0).source.sha256 not in self._rejected
            ]
            left[name] = replace(space, candidates=tuple(kept))
        return left

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
                spent |= self._search(name, space, options, deadline)
            if self._evaluator.name == "device":
                for name in spaces:
                    self._measure_finalists(name)
            else:
                self._prove_winners(list(spaces), options.proofs)
        except KeyboardInterrupt:
            return True, spent
        return False, spent

    def winners(self, layout_name: str) -> list[Winner]:
        """The winners of a layout among the candidates of this run whose sources are proven right."""
        places = [place for place, proof in self._memory.proofs.items() if proof.ok and place[0] == layout_name]
        if self._evaluator.name == "device":
            places = [_place(variant) for variant in self._right(layout_name)]
        return winners(
            self._database,
            family=self._study.family.name,
            target=self._study.target.name,
            layout=self._study.spec.layout(layout_name),
            arch=self._study.target.nvcc_arch,
            sources={source for _, source in places},
        )

    def default_us(self, layout_name: str) -> tuple[float, ...]:
        """The default candidate's times at the workload's points; empty where it was not tried, or failed."""
        default = self._rendered(layout_name, self._study.spec.default, 0)
        record = self._memory.judged.get(_key(default))
        return tuple(time.time_us for time in record.times) if record is not None else ()

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
            timed = [canonical_json(time.point) for time in record.times]
            same_points = record.status != "ok" or timed == points or record.candidate == study.spec.oracle
            if name is not None and same_device and same_points:
                self._memory.note(name, record)

    def _search(self, layout_name: str, space: Space, options: TuneOptions, deadline: float | None) -> bool:
        """Try candidates until there are enough, or no time is left (then True)."""
        study, trials = self._study, options.trials
        every = (self._rendered(layout_name, candidate, 0) for candidate in space.candidates)
        first = [study.spec.default, *options.tries, *self._evaluator.promising(every)]
        sampler = make_sampler(space, first, trials=trials, seed=study.seed)
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
        """The candidate as a trial of this run."""
        variant = self._rendered(layout_name, candidate, number)
        return self._variants.setdefault((layout_name, candidate_key(candidate)), variant)

    def _rendered(self, layout_name: str, candidate: Candidate, number: int) -> Variant:
        layout = self._study.spec.layout(layout_name)
        family = self._study.family
        key = canonical_json([family.label(candidate), family.constants(candidate, layout)])
        if key not in self._sources:
            self._sources[key] = render(family, candidate, layout)
        return Variant(number, layout_name, layout, candidate, self._sources[key])

    def _judge(self, variants: Sequence[Variant]) -> list[TrialRecord]:
        """The variants' trials in order: found in the database, else made and recorded one by one."""
        missing = [variant for variant in variants if _key(variant) not in self._memory.judged]
        for record in self._evaluator.evaluate(missing) if missing else ():
            self._record(record.layout_name, record)
            key = record.layout_name, candidate_key(record.candidate), record.source_sha256
            self._memory.judged.setdefault(key, record)
        records = [self._memory.judged[_key(variant)] for variant in variants]
        for record in records:
            self.statuses[record.status] += 1
            self._listener.trial_done(record)
        return records

    def _record(self, layout_name: str, record: TrialRecord) -> None:
        self._database.add_trial(record)
        self._memory.note(layout_name, record)
        self.new_trials += 1

    def _prove_winners(self, layout_names: Sequence[str], most: int) -> None:
        """Prove few good candidates a layout, and its oracle; where one is wrong, another is chosen in its place."""
        self._listener.phase("proving winners in the emulator")
        while to_prove := {_place(variant): variant for name in layout_names for variant in self._unproven(name, most)}:
            resident = {place: self._judged(variant).blocks_per_sm or 1 for place, variant in to_prove.items()}
            self._proofs_due += len(to_prove)
            self._listener.proofs(self._proofs_done, self._proofs_due)
            prove(self._study, {place: (to_prove[place], resident[place]) for place in to_prove}, self._proof_done)
        for place, proof in self._memory.proofs.items():
            self._keep_proof(place, proof)

    def _unproven(self, layout_name: str, most: int) -> list[Variant]:
        """The variants of a layout that should be proven and are not."""
        right = [
            variant
            for variant in self._right(layout_name)
            if (proof := self._memory.proofs.get(_place(variant))) is None or proof.ok
        ]
        weights = [item.weight for item in self._study.spec.workload.points]
        oracle = candidate_key(self._study.spec.oracle)
        tuned = [self._judged(variant) for variant in right if candidate_key(variant.candidate) != oracle]
        few = choose_few(tuned, weights, self._study.spec.default, most)
        wanted = {candidate_key(trial.candidate) for trial in few} | {oracle}
        return [
            variant
            for variant in right
            if candidate_key(variant.candidate) in wanted and _place(variant) not in self._memory.proofs
        ]

    def _proof_done(self, place: SourceKey, proof: Proof) -> None:
        self._keep_proof(place, proof)
        self._proofs_done += 1
        self._listener.proofs(self._proofs_done, self._proofs_due)

    def _keep_proof(self, place: SourceKey, proof: Proof) -> None:
        """Record a proof with every candidate of its source that was tried, unless it is recorded already."""
        self._memory.proofs[place] = proof
        for variant in self._right(place[0]):
            if _place(variant) == place and not self._memory.checked.get(_key(variant)):
                trial = replace(self._judged(variant), run_id=self._study.run_id, number=variant.number)
                self._record(variant.layout_name, proven_trial(trial, proof))

    def _right(self, layout_name: str) -> list[Variant]:
        """The variants of a layout that this run has tried and found ok, in the order of their trials."""
        mine = [variant for variant in self._variants.values() if variant.layout_name == layout_name]
        judged = [variant for variant in mine if _key(variant) in self._memory.judged]
        return [variant for variant in judged if self._judged(variant).status == "ok"]

    def _judged(self, variant: Variant) -> TrialRecord:
        return self._memory.judged[_key(variant)]

    def _measure_finalists(self, layout_name: str) -> None:
        """Time the winners and the default side by side, unless all of them were already."""
        self._listener.phase(f"measuring finalists for {layout_name}")
        spec = self._study.spec
        names = {winner.candidate_key: winner.candidate for winner in self.winners(layout_name)}
        names.setdefault(candidate_key(spec.default), spec.default)
        right = [variant for variant in self._right(layout_name) if candidate_key(variant.candidate) in names]
        if all(self._memory.checked.get(_key(variant), 0) >= 2 for variant in right):
            return
        for record in self._evaluator.finish(right):
            self._record(layout_name, record)


def _key(variant: Variant) -> tuple[str, str, str]:
    return variant.layout_name, candidate_key(variant.candidate), variant.source.sha256


def _place(variant: Variant) -> SourceKey:
    return variant.layout_name, variant.source.sha256
