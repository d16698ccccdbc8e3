"""Launch parameters of the portable attention kernels, by architecture and head dimension. Everything is written out.

A *numerics class* is what decides bits: the matrix instruction with the indices that each one contracts, the keys of a
forward tile (a row's maximum moves once a tile, its sum is added tile by tile), and the layout of the sum over a tile's
keys. `columns` of the forward entries, `nonkdim` and `kpack` belong to it and are equal for every entry of a class;
warps must lie along the rows, so that a row is summed inside one warp. The other parameters are free: rows of a tile,
warps, stages, and the columns of the backward entries, where nothing is reduced over a row.
"""

from __future__ import annotations

from dataclasses import dataclass

CUDA, GFX942, GFX950 = "sm_90", "gfx942", "gfx950"


class NoAttentionLaunchError(LookupError):
    """No entry for an architecture or a head dimension: its numerics class was never certified."""


@dataclass(frozen=True)
class Launch:
    """One entry.

    Attributes:
        rows: rows of a tile that one program owns (queries; keys in dK, dV).
        columns: rows of the other side that it meets at a time.
        num_warps, num_stages: free inside a class.
        nonkdim: rows of AMD's matrix instruction; 0 where the architecture has no choice.
        kpack: K elements that a lane of the wavefront packs (AMD).
        waves_per_eu: occupancy hint (AMD), free.
        branch: whether tiles that every row sees whole skip the mask. Free of bits on NVIDIA; on AMD the branch hides
            from the compiler that one product feeds the next, and it puts warps along the keys.
    """

    rows: int
    columns: int
    num_warps: int
    num_stages: int
    nonkdim: int = 0
    kpack: int = 1
    waves_per_eu: int = 0
    branch: bool = False


@dataclass(frozen=True)
class Entries:
    """Launches of one class. `decode` serves few query rows; heads of a group then share its tile."""

    forward: Launch
    decode: Launch
    dq: Launch
    dkv: Launch

    def __post_init__(self) -> None:
        for name, entry in (("forward", self.forward), ("decode", self.decode)):
            if entry.nonkdim and entry.branch:
                raise ValueError(f"{name} entry: a branch puts AMD's warps along the keys; give branch=False")
            # 16 rows a warp on both vendors: fewer, and warps would share a row.
            if entry.rows < 16 * entry.num_warps:
                raise ValueError(
                    f"{name} entry: {entry.num_warps} warps over {entry.rows} rows would lie along the keys; "
                    f"a row is summed inside one warp, so give at least {16 * entry.num_warps} rows"
                )
        if self.forward.columns != self.decode.columns:
            raise ValueError(
                f"forward walks {self.forward.columns} keys at a time, decode {self.decode.columns}: that number "
                "decides bits, so decode would not have the bits of prefill"
            )


def _amd(
    forward: tuple[int, int, int],
    decode: tuple[int, int, int],
    dq: tuple[int, int, int],
    dkv: tuple[int, int, int],
) -> Entries:
    """(rows, columns, warps) of each; one stage, 16-row instructions, no packing: the same for all of AMD."""
    return Entries(
        *(Launch(*entry, 1, nonkdim=16) for entry in (forward, decode, dq, dkv)),
    )


def _cuda(
    forward: tuple[int, int, int, int],
    decode: tuple[int, int, int, int],
    dq: tuple[int, int, int, int],
    dkv: tuple[int, int, int, int],
) -> Entries:
    """(rows, columns, warps, stages) of each, the fastest of scripts/gpu/attention_variants.py where that was run."""
    return Entries(*(Launch(*entry, branch=True) for entry in (forward, decode, dq, dkv)))


TABLE: dict[tuple[str, int], Entries] = {
    (CUDA, 64): _cuda((128, 128, 8, 2), (64, 128, 4, 2), (128, 128, 8, 2), (128, 64, 8, 2)),
    (CUDA, 128): _cuda((128, 128, 8, 3), (128, 128, 8, 2), (64, 64, 4, 2), (64, 32, 4, 3)),
    (CUDA, 256): _cuda((128, 64, 8, 2), (128, 64, 8, 2), (128, 32, 8, 2), (64, 32, 8, 2)),
    (GFX942, 64): _amd((128, 64, 4), (16, 64, 1), (128, 64, 4), (64, 64, 4)),
    (GFX942, 128): _amd((128, 64, 8), (16, 64, 1), (64, 64, 4), (64, 64, 4)),
    (GFX942, 256): _amd((64, 64, 4), (64, 64, 4), (64, 32, 4), (64, 32, 4)),
    (GFX950, 64): _amd((128, 64, 4), (16, 64, 1), (128, 64, 4), (64, 64, 4)),
    (GFX950, 128): _amd((128, 64, 8), (16, 64, 1), (128, 64, 8), (64, 64, 4)),
    (GFX950, 256): _amd((64, 64, 4), (64, 64, 4), (64, 32, 4), (64, 32, 4)),
}
"""(architecture, head dimension padded to a power of two) -> entries."""

HEAD_DIMS = (64, 96, 128, 192, 256)
"""Head dimensions that the kernels cover: of queries and keys, and of values."""


def padded(d: int) -> int:
    """The head dimension as a tile has it."""
    return 1 << (d - 1).bit_length()


def entries_for(arch: str, d: int) -> Entries:
    """The entries for a head dimension of HEAD_DIMS.

    Raises:
        NoAttentionLaunchError: an architecture that the table does not have.
    """
    try:
        return TABLE[arch, padded(d)]
    except KeyError:
        known = sorted({a for a, _ in TABLE})
        raise NoAttentionLaunchError(
            f"no attention launch for head dimension {d} on {arch}: known architectures are {', '.join(known)}, known "
            f"head dimensions {HEAD_DIMS}. Its numerics class is not certified; run on one of those, or add and "
            "certify an entry."
        ) from None
