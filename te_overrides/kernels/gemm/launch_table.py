"""Launch parameters of the portable GEMM, keyed by architecture, operation and rows. Everything is written out.

A *numerics class* is what decides bits: the matrix instruction, the set of K indices that each one takes, the order of
the chain. Tiles, warps, stages and grouping may be tuned inside a class; `nonkdim`, `block_k` and `kpack` may not, for
on AMD they change which K indices meet in one instruction. One class an (architecture, input width).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Launch:
    """One entry.

    Attributes:
        block_m, block_n, block_k: tile.
        num_warps, num_stages, group_m: free inside a class.
        nonkdim: rows of AMD's matrix instruction; 0 where the architecture has no choice.
        kpack: K elements a lane of the wavefront packs (AMD).
        waves_per_eu: occupancy hint (AMD), free.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8
    nonkdim: int = 0
    kpack: int = 1
    waves_per_eu: int = 0


CUDA, GFX942, GFX950 = "sm_90", "gfx942", "gfx950"
ROWS = (16, 32, 64, 1 << 30)
"""Upper ends of the buckets of M."""

TABLE: dict[tuple[str, str], tuple[Launch, ...]] = {
    (CUDA, "one_lane"): (
        Launch(16, 32, 128, 4, 6),
        Launch(32, 32, 128, 4, 6),
        Launch(64, 64, 128, 4, 4),
        Launch(128, 256, 64, 8, 3),
    ),
    (CUDA, "lane_tree"): (
        Launch(16, 32, 128, 4, 6),
        Launch(32, 32, 128, 4, 6),
        Launch(64, 64, 128, 4, 4),
        Launch(128, 128, 64, 8, 4),
    ),
    (CUDA, "gated"): (
        Launch(16, 32, 128, 4, 4),
        Launch(32, 32, 128, 4, 4),
        Launch(64, 64, 64, 4, 4),
        Launch(128, 128, 64, 8, 3),
    ),
    (GFX942, "one_lane"): (
        Launch(16, 64, 64, 4, 2, nonkdim=16, kpack=2),
        Launch(32, 64, 64, 4, 2, nonkdim=16, kpack=2),
        Launch(64, 64, 64, 4, 2, nonkdim=16, kpack=2),
        Launch(128, 128, 64, 8, 2, nonkdim=16, kpack=2),
    ),
    (GFX942, "gated"): (
        Launch(16, 64, 64, 4, 2, nonkdim=16, kpack=2),
        Launch(32, 64, 64, 4, 2, nonkdim=16, kpack=2),
        Launch(64, 64, 64, 4, 2, nonkdim=16, kpack=2),
        Launch(128, 64, 64, 8, 2, nonkdim=16, kpack=2),
    ),
    (GFX942, "lane_tree"): (
        Launch(16, 64, 64, 4, 2, nonkdim=16, kpack=2),
        Launch(32, 64, 64, 4, 2, nonkdim=16, kpack=2),
        Launch(64, 64, 64, 4, 2, nonkdim=16, kpack=2),
        Launch(128, 128, 64, 8, 2, nonkdim=16, kpack=2),
    ),
    (GFX950, "one_lane"): (
        Launch(16, 64, 64, 4, 2, nonkdim=16),
        Launch(32, 64, 64, 4, 2, nonkdim=16),
        Launch(64, 64, 64, 4, 2, nonkdim=16),
        Launch(128, 128, 64, 8, 2, nonkdim=16),
    ),
    (GFX950, "gated"): (
        Launch(16, 64, 64, 4, 2, nonkdim=16),
        Launch(32, 64, 64, 4, 2, nonkdim=16),
        Launch(64, 64, 64, 4, 2, nonkdim=16),
        Launch(128, 64, 64, 8, 2, nonkdim=16),
    ),
    (GFX950, "lane_tree"): (
        Launch(16, 64, 64, 4, 2, nonkdim=16),
        Launch(32, 64, 64, 4, 2, nonkdim=16),
        Launch(64, 64, 64, 4, 2, nonkdim=16),
        Launch(128, 128, 64, 8, 2, nonkdim=16),
    ),
}


class NoLaunchError(LookupError):
    """No entry for an architecture: its numerics class was never certified."""


def launch_for(arch: str, operation: str, m: int) -> Launch:
    """The entry for `m` rows.

    Raises:
        NoLaunchError: an architecture or operation that the table does not have.
    """
    try:
        entries = TABLE[arch, operation]
    except KeyError:
        known = sorted({a for a, _ in TABLE})
        raise NoLaunchError(
            f"no GEMM launch for {operation} on {arch}: known architectures are {', '.join(known)}. Its numerics "
            "class is not certified; run on one of those, or add and certify an entry."
        ) from None
    return next(entry for limit, entry in zip(ROWS, entries, strict=True) if m <= limit)
