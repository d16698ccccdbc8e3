"""The layouts and numbers of rows in which the feed-forward block is compared with itself on one rank."""

from __future__ import annotations

from dataclasses import dataclass

FULL = (4096, 12288)
"""Hidden and intermediate size of the published matrix (Qwen3-8B's)."""
SMALL = (128, 384)
"""The same for the plain-torch references on a CPU."""
ROWS_OF_BATCH = 4096
"""Rows of the batch out of which slices are taken."""
SLICES = ((0, 1), (0, 8), (0, 31), (0, 33), (0, 127), (1000, 1031), (0, 4096))
"""First row and end of each slice."""


@dataclass(frozen=True)
class Mesh:
    """Ranks of one model: tensor parallel, context parallel, and whether sequences are split over TP as well."""

    tp: int = 1
    cp: int = 1
    sp: bool = False

    @property
    def ranks(self) -> int:
        return self.tp * self.cp

    @property
    def name(self) -> str:
        return f"tp{self.tp}" + (f"_cp{self.cp}" if self.cp > 1 else "") + ("_sp" if self.sp else "")


ONE = Mesh()
MESHES = (
    Mesh(2), Mesh(2, 1, True), Mesh(4), Mesh(2, 2), Mesh(2, 2, True), Mesh(8), Mesh(4, 2), Mesh(4, 2, True),
)  # fmt: skip
"""The published layouts."""


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        mesh: the layout.
        rows: tokens of the whole micro-batch.
        kind: "forward" (inference and training output), "backward" (and dHidden, dWeights), "slices" (rows out of a
            batch against that batch).
    """

    mesh: Mesh
    rows: int
    kind: str

    @property
    def name(self) -> str:
        return f"{self.mesh.name} M={self.rows} {self.kind}"


def cases(most_ranks: int = 8) -> list[Case]:
    """Every case whose world is at most so large, in the order in which they run."""
    found = [Case(ONE, rows, "forward") for rows in (1, 8, 32)]
    found += [Case(mesh, 32, "forward") for mesh in MESHES]
    found += [Case(mesh, 8, "backward") for mesh in (ONE, *MESHES)]
    found += [Case(mesh, ROWS_OF_BATCH, "slices") for mesh in (ONE, Mesh(2), Mesh(4))]
    return [case for case in found if case.mesh.ranks <= most_ranks]
