"""How the tensors of a call become the parameters of a family's kernels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

Point = Mapping[str, int]


@dataclass(frozen=True)
class TensorRule:
    """What one tensor of a call must be.

    ``dtypes`` are torch's names. ``shape`` names its dimensions: those in the call's sizes are required, others
    are free; ``1?`` is a dimension of 1 that may be left out. It must be contiguous, or only its rows (all but the
    first dimension) if ``rows_apart``. ``aligned`` asks for 16-byte addresses of the tensor and of its rows.
    ``table`` asks for a `kgen.runtime.PointerTable` instead of a tensor; what it points at may be written.
    """

    name: str
    dtypes: tuple[str, ...]
    shape: tuple[str, ...]
    optional: bool = False
    rows_apart: bool = False
    aligned: bool = False
    writable: bool = False
    table: bool = False


@dataclass(frozen=True)
class Sizes:
    """The sizes of one call that its tensors' shapes say.

    ``dimensions`` are those that `TensorRule.shape` names; ``point`` is what the dispatch table is asked (axes that it
    lacks come from the hint or the capacity); ``extents`` are what the launch plan must cover.
    """

    dimensions: Mapping[str, int]
    point: Mapping[str, int]
    extents: Mapping[str, int]
    is_empty: bool


class Binding(ABC):
    """One family's tensors, for one layout.

    ``plan_axes`` are the capacities that a call may use less of, so that its grid shrinks;
    ``lengths`` are the tensors of offsets from which the plan's shared launches make what calls may share.
    """

    rules: tuple[TensorRule, ...]
    options: ClassVar[tuple[str, ...]]
    plan_axes: ClassVar[tuple[str, ...]]
    lengths: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def sizes(self, tensors: Mapping[str, Any], options: Mapping[str, Any]) -> Sizes:
        """The sizes of a call, checked against the capacity. Raises TensorError."""

    @abstractmethod
    def scalars(self, tensors: Mapping[str, Any], sizes: Sizes, options: Mapping[str, Any]) -> dict[str, int | float]:
        """The parameters that are no pointers and that the plan does not decide. Raises TensorError."""

    @abstractmethod
    def check_content(self, tensors: Mapping[str, Any], sizes: Sizes) -> None:
        """Look at the values (this waits for the device). Raises TensorError."""
