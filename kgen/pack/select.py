"""Which variants a pack holds: the winners of the tuning database, the default and the oracle, as dispatch tables."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kgen.canonical import canonical_json, key_text
from kgen.db import TuningDatabase, Winner, winners
from kgen.db.reject import rejected, rejected_error
from kgen.errors import InputError
from kgen.family import Candidate, Layout
from kgen.records import TrialRecord
from kgen.render import Source, render
from kgen.runtime.manifest import PackedBucket, PackedLayout, Proof, Role
from kgen.spec import Spec
from kgen.spec.checks import violation
from kgen.targets import Target


@dataclass
class Variant:
    """One candidate that is packed, the layouts that use it and the targets it is built for."""

    name: str
    role: Role
    candidate: Candidate
    source: Source
    proofs: dict[str, Proof] = field(default_factory=dict)
    targets: dict[str, Target] = field(default_factory=dict)
    timed_blocks: dict[str, int] = field(default_factory=dict)


class Selection:
    """The variants by name, and the dispatch tables by target and layout that name them."""

    def __init__(self, spec: Spec, db: TuningDatabase) -> None:
        self.spec, self._db, self._rejected = spec, db, rejected(db)
        self.variants: dict[str, Variant] = {}
        self.tables: dict[str, dict[str, PackedLayout]] = {}
        self.unproven: list[tuple[str, str, str]] = []
        self._sources: dict[bytes, Source] = {}

    def add_target(self, name: str, layouts: Sequence[str]) -> None:
        """Add a target's winners. InputError where no layout of it was tuned with the templates of today."""
        target = self.spec.target(name)
        wanted = [dict(self.spec.layout(layout_name)) for layout_name in layouts]
        trials = [
            record
            for record in self._db.trials(family=self.spec.family.name, status="ok")
            if dict(record.layout) in wanted
            and self._is_possible(record.candidate)
            and self._is_current(record, target)
        ]
        self.tables[name] = {}
        for layout_name in layouts:
            layout = self.spec.layout(layout_name)
            mine = [record for record in trials if dict(record.layout) == dict(layout)]
            found = winners(
                self._db,
                family=self.spec.family.name,
                target=name,
                layout=layout,
                arch=target.nvcc_arch,
                sources=may_win(mine),
            )
            self.tables[name][layout_name] = self._table(target, layout_name, found, proven(mine))
        if not any(table.buckets for table in self.tables[name].values()):
            wrong = f"holds no trial of {self.spec.family.name} for {name} with these templates"
            raise InputError("tuning database", wrong, remedy=f"kgen tune --spec {self.spec.path.name} --target {name}")

    def _is_possible(self, candidate: Candidate) -> bool:
        """Whether the spec of today knows the parameters; a trial with others says nothing about its kernels."""
        return candidate.keys() == self.spec.tunables.keys() or candidate == self.spec.oracle

    def _is_current(self, record: TrialRecord, target: Target) -> bool:
        """Whether a trial's candidate is still feasible and still renders to the source that was tried."""
        if violation(self.spec.family, record.candidate, record.layout, target, self.spec.label):
            return False
        return self._render(record.candidate, record.layout).sha256 == record.source_sha256

    def _render(self, candidate: Candidate, layout: Layout) -> Source:
        key = canonical_json([self.spec.family.label(candidate), self.spec.family.constants(candidate, layout)])
        if key not in self._sources:
            self._sources[key] = render(self.spec.family, candidate, layout)
        return self._sources[key]

    def _table(
        self, target: Target, layout_name: str, found: Sequence[Winner], proofs: Mapping[str, Proof]
    ) -> PackedLayout:
        default = self._variant("default", self.spec.default, layout_name, target, proofs)
        oracle = self._variant("oracle", self.spec.oracle, layout_name, target, proofs)
        names = {
            winner.candidate_key: self._variant("tuned", winner.candidate, layout_name, target, proofs)
            for winner in found
        }
        for winner in found:
            if winner.blocks_per_sm:
                timed = self.variants[names[winner.candidate_key]].timed_blocks
                timed[target.nvcc_arch] = min(winner.blocks_per_sm, timed.get(target.nvcc_arch, winner.blocks_per_sm))
        axes = {axis: tuple(sorted({winner.point[axis] for winner in found})) for axis in self.spec.family.axes}
        buckets = [
            PackedBucket(
                point=dict(winner.point),
                variant=names[winner.candidate_key],
                evidence=winner.evidence,
                time_us=float(winner.time_us),
                tie=(names[winner.runner_up_key],) if winner.tie and winner.runner_up_key in names else (),
            )
            for winner in found
        ]
        buckets.sort(key=lambda bucket: [bucket.point[axis] for axis in self.spec.family.axes])
        return PackedLayout(dict(self.spec.layout(layout_name)), axes, default, oracle, tuple(buckets))

    def _variant(
        self, role: Role, candidate: Candidate, layout_name: str, target: Target, proofs: Mapping[str, Proof]
    ) -> str:
        """The name of a candidate's variant, which is made, or is marked for this layout and target too.

        InputError for the default or the oracle where its source is rejected; a winner's never is.
        """
        source = self._render(candidate, self.spec.layout(layout_name))
        if rejection := self._rejected.get(source.sha256):
            raise rejected_error(f"{role} candidate of {self.spec.label}", rejection)
        name = variant_name(self.spec.family.label(candidate), candidate, source)
        variant = self.variants.setdefault(name, Variant(name, role, dict(candidate), source))
        variant.targets[target.name] = target
        if layout_name not in variant.proofs:
            proof = proofs.get(proof_key(candidate, source.sha256))
            if proof is None:
                self.unproven.append((name, layout_name, target.name))
            variant.proofs[layout_name] = proof or Proof("", None)
        return name


def variant_name(label: str, candidate: Candidate, source: Source) -> str:
    """A family's label, and a digest of the source and of all parameters, those too that are decided at launch."""
    digest = hashlib.sha256(canonical_json([dict(candidate), source.sha256])).hexdigest()
    return f"{label}__{digest[:8]}"


def proof_key(candidate: Candidate, source_sha256: str) -> str:
    """What a proof is of, for one layout."""
    return f"{source_sha256} {key_text(candidate)}"


def may_win(trials: Sequence[TrialRecord]) -> set[str]:
    """The sources of one layout that may win: those proven right, as in tuning; all of them where none is."""
    proven_right = {record.source_sha256 for record in trials if record.checked_on}
    return proven_right or {record.source_sha256 for record in trials}


def proven(trials: Iterable[TrialRecord]) -> dict[str, Proof]:
    """The proofs that the trials of one layout left; one on a device goes before one in the emulator."""
    proofs: dict[str, Proof] = {}
    for record in trials:
        if record.checked_on:
            key = proof_key(record.candidate, record.source_sha256)
            if key not in proofs or (record.checked_on == "device" and proofs[key].checked_on != "device"):
                proofs[key] = Proof(record.checked_on, record.relative_error)
    return proofs
