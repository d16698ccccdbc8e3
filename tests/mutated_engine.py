"""The engine of `verify model` with two faults put in, for tests that must see them.

A sum over ranks is a chain instead of the balanced tree; two ranks cannot tell. Rank 1 of the row CP2 raises, and
rank 0 waits for it.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["DETERMINISTIC_ROCM"] = "invariant"
import patches.auto  # noqa: E402, F401
from megatron_plugins.verify.model import engine  # noqa: E402


def chain(terms, wide, out):
    """((a + b) + c) + d."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total if out is None else out.copy_(total)


def main() -> None:
    """Put the faults in, then be the engine."""
    from megatron_plugins.verify.model import train
    from te_overrides.kernels.collectives import reference

    assert callable(reference._tree)
    reference._tree = chain
    plain = train.run_row

    def raising(setting, row, rank, *rest):
        if row.name == "CP2" and rank == 1:
            raise ArithmeticError("this rank was told to fail")
        return plain(setting, row, rank, *rest)

    train.run_row = raising
    engine.main()


if __name__ == "__main__":
    main()
