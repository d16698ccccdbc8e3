"""TransformerEngine up to 2.2, which keeps the ring in `attention.py`, is refused.

Its correction functions are those of later releases, in another module and without anything here that could run them:
2.3 moved them to `context_parallel.py`, where the overrides look. Without this file a job on 2.2 would report every
override as "not imported in this process" and go on with upstream's merge.

Seam: the merge itself, in the module that has it up to 2.2. From 2.3 on the name does not exist there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from patches import override
from patches.errors import NotCoveredError


@override(
    id="te.before_context_parallel_module",
    target="transformer_engine.pytorch.attention:flash_attn_fwd_softmax_lse_correction",
    modes=("stable", "invariant"),
    why="up to 2.2 the ring is in another module, where no override looks: it would run as it is",
    how="refuses the import",
    retire_when="nobody installs TransformerEngine 2.2 or older",
    evidence="docs/compatibility.md",
    distribution="transformer-engine",
    versions="<2.3",
)
def build(original: Callable[..., None]) -> Callable[..., Any]:
    raise NotCoveredError(
        "sought TransformerEngine 2.3 or newer, found one whose context parallelism is in attention.py (up to 2.2): "
        "nothing here replaces it. Install a release that was reviewed (`python -m patches explain te.lse_merge`), or "
        "run without --deterministic-rocm."
    )
