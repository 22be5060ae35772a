"""How a flash candidate of verify_mla divides a block's work, and what it takes of a chip."""

from __future__ import annotations

from collections.abc import Mapping

from kgen.families.verify_mla_binding import ELEMENT_BYTES
from kgen.family import Candidate, Layout, Value
from kgen.targets import Target

ROW_PAD_BYTES = 16  # shared rows of 1168 or 592 bytes: ldmatrix then touches every bank once
PROBABILITY_PAD = 8  # elements after each row of P in shared memory, for the same reason
COPY_WARPS = {"all": 0, "warp": 1, "group": 4}  # warps of a block that only copy, by who copies
COPY_REGISTERS = 24  # of a thread that only copies, once it has handed on the others: the least there are
MOST_REGISTERS = 240  # of a thread that has taken some
NAMED_BARRIERS = 15  # of a block, besides that of all its threads (PTX ISA, bar)
REGISTER_SLACK = 16  # a candidate that leaves less for addresses, softmax state and the loop spills (nvcc 13.0)


def integer(candidate: Mapping[str, Value], name: str) -> int:
    """A tunable or layout field that is a whole number."""
    return int(candidate[name])


def element_bytes(layout: Mapping[str, Value]) -> int:
    """Of an element of a KV row."""
    return ELEMENT_BYTES[str(layout["dtype"])]


class Tiling:
    """How a flash candidate divides a block's work; every other number of the kernel follows from it.

    ``row_groups`` groups of ``group_warps`` warps each own ``group_rows`` rows of the tile. For S = Q K^T a
    group's warps are ``k_split`` slices of the head dimension x ``key_split`` parts of the keys (both: ``sharers``) x
    ``score_parts`` parts of its rows; for the softmax each owns ``own_rows`` of its part's rows; for P V they are
    ``group_warps`` slices of the latent columns.
    """

    def __init__(self, candidate: Candidate, layout: Layout) -> None:
        self.tile_m = integer(candidate, "tile_m")
        self.tile_n = integer(candidate, "tile_n")
        self.stages = integer(candidate, "stages")
        self.warps = integer(candidate, "warps")
        self.copy_warps = COPY_WARPS[str(candidate["copiers"])]
        self.row_groups = integer(candidate, "row_groups")
        self.k_split = integer(candidate, "k_split")
        self.key_split = integer(candidate, "key_split")
        self.blocks_per_sm = integer(candidate, "blocks_per_sm")
        self.latent = integer(layout, "latent")
        self.head_dim = self.latent + integer(layout, "rope")
        self.element_bytes = element_bytes(layout)

    @property
    def threads(self) -> int:
        return (self.warps + self.copy_warps) * 32

    @property
    def warp_registers(self) -> int:
        """Registers that a thread takes when copying warps hand theirs on; 0 where they do not.

        ptxas gives every thread the most that lets ``blocks_per_sm`` blocks reside. An SM has 65536 (cc 9.0 and 12.0);
        they come by eights.
        """
        at_launch = 65536 // (self.threads * self.blocks_per_sm) // 8 * 8
        if self.copy_warps != 4 or at_launch >= MOST_REGISTERS:  # only a whole group of four can (PTX ISA, setmaxnreg)
            return 0
        left = at_launch * self.threads - self.copy_warps * 32 * COPY_REGISTERS
        return min(left // (self.warps * 32) // 8 * 8, MOST_REGISTERS)

    @property
    def group_warps(self) -> int:
        return self.warps // self.row_groups

    @property
    def group_rows(self) -> int:
        return self.tile_m // self.row_groups

    @property
    def sharers(self) -> int:
        return self.k_split * self.key_split

    @property
    def score_parts(self) -> int:
        return self.group_warps // self.sharers

    @property
    def score_keys(self) -> int:
        """Keys of S that one warp computes."""
        return self.tile_n // self.key_split

    @property
    def score_rows(self) -> int:
        """Rows of S that one warp computes a slice of."""
        return self.group_rows // self.score_parts

    @property
    def own_rows(self) -> int:
        """Rows that one warp softens: a quad of lanes each, as the mma leaves them."""
        return self.score_rows // self.sharers

    @property
    def fill_warps(self) -> int:
        """Warps that fill a stage together."""
        return self.copy_warps or self.group_warps

    @property
    def packet_floats(self) -> int:
        """Values of S that one warp sends another: the other's rows x its own keys."""
        return self.own_rows * self.score_keys

    @property
    def senders(self) -> int:
        """Warps that send S to one: itself is among them unless it can keep its own share in registers."""
        return self.sharers - (self.own_rows == 8 and self.key_split == 1)

    def divides(self) -> bool:
        """Whether every division above is exact and every warp has whole mma tiles and quads."""
        return (
            self.warps % self.row_groups == 0
            and self.tile_m % (16 * self.row_groups) == 0
            and self.group_warps % self.sharers == 0
            and (self.head_dim // 16) % self.k_split == 0
            and self.group_rows % (16 * self.score_parts) == 0
            and self.score_keys % 16 == 0
            and self.own_rows in (2, 4, 8)
            and self.latent % (32 * self.group_warps) == 0
            and self.tile_n % self.fill_warps == 0
            and self.tile_n // self.fill_warps <= 32
            and (self.copy_warps != 4 or self.warps % 4 == 0)  # whole groups of four hand registers on or take them
            and self.row_groups + (1 if self.copy_warps else self.stages) <= NAMED_BARRIERS
        )

    @property
    def dense_bytes(self) -> int:
        """Of a KV row in memory."""
        return self.head_dim * self.element_bytes

    @property
    def row_bytes(self) -> int:
        return self.dense_bytes + ROW_PAD_BYTES

    @property
    def offsets(self) -> dict[str, int]:
        """Byte offsets of the shared arrays, and their total."""
        sizes = {
            "kv": self.stages * self.tile_n * self.row_bytes,
            "score": self.warps * self.senders * self.packet_floats * 4,
            "probability": self.tile_m * (self.tile_n + PROBABILITY_PAD) * 2,
            "factor": self.tile_m * 4,
            "full": self.stages * (16 if self.copy_warps else 8),
        }
        offsets, at = {}, 0
        for name, size in sizes.items():
            offsets[name] = at
            at += -(-size // 16) * 16
        return offsets | {"total": at}

    @property
    def shared_bytes(self) -> int:
        return self.offsets["total"]

    @property
    def register_floor(self) -> int:
        """Registers a thread holds across the main loop: O, Q, S and double-buffered fragments."""
        output = self.group_rows // 16 * (self.latent // self.group_warps // 8) * 4
        query = self.score_rows // 16 * (self.head_dim // 16 // self.k_split) * 4
        score = max(4, self.score_rows // 16 * 2) * 4  # of 16 keys
        return output + query + max(score + 8, self.group_rows // 16 * 4 + 8)

    @property
    def warp_elements(self) -> float:
        """Elements of K and V that one warp fetches for one KV tile."""
        return self.score_keys * self.head_dim / self.k_split + self.tile_n * self.latent / self.group_warps

    @property
    def step_shared_bytes(self) -> float:
        """Shared-memory bytes that one KV tile moves: K and V fragments, S exchange, P."""
        scores = 4.0 * 2 * self.tile_m * self.tile_n * self.senders / self.key_split
        probabilities = 2.0 * self.tile_m * self.tile_n * (1 + self.group_warps)
        return self.element_bytes * self.warps * self.warp_elements + scores + probabilities


def is_flash(candidate: Candidate) -> bool:
    """Whether it is no oracle."""
    return candidate["algorithm"] == "flash"


def tiles_divide(candidate: Candidate, layout: Layout, target: Target) -> bool:
    """Constraint: whole mma tiles for every warp."""
    return not is_flash(candidate) or Tiling(candidate, layout).divides()


def shared_fits(candidate: Candidate, layout: Layout, target: Target) -> bool:
    """Constraint: the resident blocks' shared memory is within a block's and an SM's."""
    if not is_flash(candidate):
        return True
    tiling = Tiling(candidate, layout)
    resident = tiling.blocks_per_sm * (tiling.shared_bytes + target.shared_bytes_reserved)
    return tiling.shared_bytes <= target.shared_bytes_per_block and resident <= target.shared_bytes_per_sm


def registers_fit(candidate: Candidate, layout: Layout, target: Target) -> bool:
    """Constraint: what a thread holds across the main loop leaves room for the rest."""
    if not is_flash(candidate):
        return True
    tiling = Tiling(candidate, layout)
    cap = min(target.registers_per_thread, target.registers_per_sm // (tiling.threads * tiling.blocks_per_sm))
    return tiling.register_floor + REGISTER_SLACK <= (tiling.warp_registers or cap)


def group_copies_in_bulk(candidate: Candidate, layout: Layout, target: Target) -> bool:
    """Constraint: with `COPY_REGISTERS` a thread, addresses of 16-byte copies spill (nvcc 13.0)."""
    return not is_flash(candidate) or candidate["copiers"] != "group" or candidate["gather"] == "bulk"


def refills_one_way(candidate: Candidate, layout: Layout, target: Target) -> bool:
    """Constraint: warps that only copy refill a stage as soon as it is left; there is no other choice."""
    return not is_flash(candidate) or candidate["copiers"] == "all" or candidate["refill"] == "late"
