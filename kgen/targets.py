"""What one row of hardware limits holds. The figures are data: specs/targets/<name>.yaml."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """One GPU architecture, as a kernel's limits and a model's ceilings.

    ``shared_bytes_per_block`` is the opt-in maximum; ``shared_bytes_reserved`` is what the driver takes
    from ``shared_bytes_per_sm`` for each resident block. Rates are per SM and clock so that a part with
    another SM count or clock is another row, not another formula.
    """

    name: str
    compute_capability: tuple[int, int]
    sms: int
    shared_bytes_per_block: int
    shared_bytes_per_sm: int
    shared_bytes_reserved: int
    warps_per_sm: int
    blocks_per_sm: int
    registers_per_sm: int
    registers_per_thread: int
    clock_mhz: int
    dram_gb_s: float
    l2_bytes: int
    mma_bf16_flop_per_clk: int
    shared_bytes_per_clk: int
    gather_bytes_per_clk: float
    dram_latency_us: float
    launch_us: float

    @property
    def nvcc_arch(self) -> str:
        """The architecture as nvcc names it, e.g. ``sm_120``."""
        return f"sm_{self.compute_capability[0]}{self.compute_capability[1]}"

    def resident_blocks(self, *, threads: int, registers: int, shared_bytes: int) -> int:
        """How many blocks of this shape one SM holds (0: it cannot launch).

        Registers are allocated per warp in units of 256 (CUDA occupancy calculator, cc 9.0 and 12.0).
        """
        if shared_bytes > self.shared_bytes_per_block or registers > self.registers_per_thread:
            return 0
        warps = -(-threads // 32)
        registers_per_warp = -(-(max(registers, 1) * 32) // 256) * 256
        return min(
            self.blocks_per_sm,
            self.warps_per_sm // warps,
            self.registers_per_sm // (registers_per_warp * warps),
            self.shared_bytes_per_sm // (shared_bytes + self.shared_bytes_reserved),
        )
