"""Prints, as JSON, a hash of one LSE merge's bits at several moments of a process: first, after other shapes, compiled.

Run by tests with $TE_SOURCES, $DETERMINISTIC_ROCM and $NVTE_TORCH_COMPILE set.
"""

from __future__ import annotations

import hashlib
import json
import logging
import warnings

import torch
from armed import context_parallel

# More shapes than Dynamo compiles before it drops to eager (8).
OTHER_SHAPES = (
    (2, 8, 2048), (2, 4, -1), (1, 8, -1), (-1, 8, 1), (4, -1), (-1, 1), (-1,), (2, 2, 2, -1), (1, 2, 4, -1),
    (2, 4, -1, 1),
)  # fmt: skip


def main() -> None:
    """The case of ROCm/TransformerEngine#693: [2, 8, 4096], other shapes, [2, 8, 4096] again."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    merge = context_parallel.flash_attn_fwd_softmax_lse_correction
    generator = torch.Generator().manual_seed(0)
    lse, step = (torch.randn(2, 8, 4096, generator=generator) * 3 for _ in range(2))

    def hashed(function: object = merge) -> str:
        out = lse.clone()
        address = out.data_ptr()
        function(out, step)  # type: ignore[operator]
        assert out.data_ptr() == address
        return hashlib.sha256(out.numpy().tobytes()).hexdigest()[:16]

    bits = {"first": hashed()}
    for shape in OTHER_SHAPES:
        elements = 2 * 8 * (2048 if shape == (2, 8, 2048) else 4096)
        other = [x.flatten()[:elements].clone().view(shape) for x in (lse, step)]
        merge(*other)
    bits["after other shapes"] = hashed()

    @torch.compile
    def outer(out: torch.Tensor, step: torch.Tensor) -> None:
        merge(out, step)

    bits["under an outer torch.compile"] = hashed(outer)
    print(json.dumps(bits))


if __name__ == "__main__":
    main()
