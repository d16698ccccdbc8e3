"""AITER's attention operators, after a look at what they are.

Everything is passed to them by position, and AITER's Python wrappers hide their signature: `sink_size`, inserted in the
middle in 2025, shifts every argument behind it by one without an error. Two guards, both before the first launch:

* the registered torch schema of each operator must start with the arguments that were reviewed, in order, and what
  follows must have defaults (`patches/schema.py`);
* the source of the two functions that bind them must be one that was read.

The kernels behind them are compiled on the machine, by AITER; no guard sees their code.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from patches import fingerprint
from patches.errors import DriftError
from patches.schema import require_prefix
from patches.target import Target

MODULE = "aiter.ops.mha"
OPERATORS = {
    "aiter::mha_fwd": (
        "aiter::mha_fwd(Tensor(a0!) q, Tensor(a1!) k, Tensor(a2!) v, float dropout_p, float softmax_scale, "
        "bool is_causal, SymInt window_size_left, SymInt window_size_right, SymInt sink_size, "
        "bool return_softmax_lse, bool return_dropout_randval) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
    "aiter::mha_bwd": (
        "aiter::mha_bwd(Tensor(a0!) dout, Tensor(a1!) q, Tensor(a2!) k, Tensor(a3!) v, Tensor(a4!) out, "
        "Tensor(a5!) softmax_lse, float dropout_p, float softmax_scale, bool is_causal, SymInt window_size_left, "
        "SymInt window_size_right, bool deterministic) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
}
"""Operator -> the arguments passed here; what follows them must have defaults. ROCm/aiter 069e9d29 (2026)."""
SOURCES = {
    "mha_fwd": ("source:a12634c066a2b1dcf34d418f7f381d2b",),
    "mha_bwd": ("source:34ad2689beb62ae3aa5e9df580d4fbab",),
}
"""Binding function -> fingerprints of its source that were read, ROCm/aiter 069e9d29."""


@functools.cache
def operators() -> tuple[Any, Any]:
    """Forward and backward operator, after both guards.

    Raises:
        DriftError: AITER is not there, or an operator or its source is not one that was reviewed.
    """
    try:
        importlib.import_module(MODULE)
    except ImportError as error:
        raise DriftError(
            f"the AITER attention core was asked for; sought {MODULE}, found {error!r}. Install ROCm's AITER, or use "
            "the layer spec with this project's kernels."
        ) from error
    for operator, reviewed in OPERATORS.items():
        require_prefix(operator, reviewed, who="the AITER attention core")
    file = fingerprint.source_file(MODULE)
    text = "" if file is None else file.read_text()
    for name, accepted in SOURCES.items():
        found = fingerprint.of_source(text, Target.parse(f"{MODULE}:{name}"))
        if found not in accepted:
            raise DriftError(
                f"the AITER attention core calls {MODULE}:{name}. Sought source that was read, {', '.join(accepted)}; "
                f"found {found or 'no such function'} in {file}. Ways on: (1) read what it does now and add its "
                "fingerprint to megatron_plugins/aiter_operators.py; (2) install the release that was read; (3) use "
                "the layer spec with this project's kernels."
            )
    import torch

    return torch.ops.aiter.mha_fwd, torch.ops.aiter.mha_bwd
