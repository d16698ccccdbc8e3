"""Upstream's LSE correction of the same operands, as the first shape of a process and after nine others.

TransformerEngine compiles the function; past Dynamo's recompile limit it drops to eager without a word, and the same
operands then give other bits (on ROCm two compiled variants differ as well: ROCm/TransformerEngine#693). This is how a
reference model and an actor in one RL process come to disagree. Prints one JSON row.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_plugins.verify.model import te_on_cpu  # noqa: E402

ELEMENTS = 1 << 16
SHAPES = (
    (2, 4, -1), (1, 8, -1), (-1, 8, 1), (4, -1), (-1, 1), (-1,), (2, 2, 2, -1), (1, 2, 4, -1), (2, 4, -1, 1)
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--te-sources", type=Path, required=True)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    from te_overrides.kernels.bits import count_mismatches

    start = time.monotonic()
    merge = te_on_cpu.load(args.te_sources).flash_attn_fwd_softmax_lse_correction
    generator = torch.Generator().manual_seed(0)
    lse, step = (torch.randn(ELEMENTS, generator=generator) * 3 for _ in range(2))

    def merged(shape: tuple[int, ...]) -> torch.Tensor:
        out = lse.clone().view(shape)
        merge(out, step.view(shape))
        return out.flatten()

    for shape in SHAPES:
        merged(shape)
    after = merged((1, 1, -1))
    # As good as a fresh process: Dynamo forgets every variant it has compiled.
    torch._dynamo.reset()
    before = merged((1, 1, -1))
    mismatched, total, _ = count_mismatches(after, before)
    print(
        json.dumps(
            {
                "event": "lse",
                "mismatched": mismatched,
                "total": total,
                "max_abs": float((after - before).abs().max()),
                "seconds": time.monotonic() - start,
            }
        )
    )


if __name__ == "__main__":
    main()
