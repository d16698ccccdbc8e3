"""An `aiter` package whose operators are registered with torch under schemas of the test's choice and run on a CPU.

Its arithmetic depends on how many heads and batch rows share a launch, as a library's may.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

FORWARD = (
    "(Tensor(a0!) q, Tensor(a1!) k, Tensor(a2!) v, float dropout_p, float softmax_scale, bool is_causal, "
    "SymInt window_size_left, SymInt window_size_right, SymInt sink_size, bool return_softmax_lse, "
    "bool return_dropout_randval, Tensor(a11!)? cu_seqlens_q=None, Generator? gen=None) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
BACKWARD = (
    "(Tensor(a0!) dout, Tensor(a1!) q, Tensor(a2!) k, Tensor(a3!) v, Tensor(a4!) out, Tensor(a5!) softmax_lse, "
    "float dropout_p, float softmax_scale, bool is_causal, SymInt window_size_left, SymInt window_size_right, "
    "bool deterministic, Tensor(a12!)? dq=None) -> (Tensor, Tensor, Tensor, Tensor)"
)
_SOURCE = """
import torch

LIBRARY = torch.library.Library("aiter", "FRAGMENT")
CALLS = []


def attend(q, k, v, scale, causal, left, right):
    rows, keys = q.shape[1], k.shape[1]
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    distance = torch.arange(keys) - torch.arange(rows)[:, None]
    hidden = (distance > 0) if causal else torch.zeros_like(distance, dtype=torch.bool)
    hidden |= distance < -left if left >= 0 else False
    hidden |= distance > right if right >= 0 else False
    s = (q @ k.transpose(2, 3) * scale).masked_fill(hidden, -torch.inf)
    # What a launch holds is in the bits.
    return (s.softmax(-1) @ v * (1 + q.shape[0] * q.shape[1] * 2.0**-6)).transpose(1, 2), s.logsumexp(-1)


def mha_fwd(q, k, v, dropout_p, softmax_scale, is_causal, left, right, sink_size, return_lse, return_randval, *_):
    assert (dropout_p, sink_size, return_lse, return_randval) == (0.0, 0, True, False)
    CALLS.append(("forward", tuple(q.shape), tuple(k.shape)))
    out, lse = attend(q, k, v, softmax_scale, is_causal, left, right)
    return out.to(q.dtype), lse.float(), torch.empty(0), torch.empty(0)


def mha_bwd(dout, q, k, v, out, lse, dropout_p, softmax_scale, is_causal, left, right, deterministic, *_):
    assert dropout_p == 0.0 and deterministic
    CALLS.append(("backward", tuple(q.shape), tuple(k.shape)))
    with torch.enable_grad():
        leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
        again, _ = attend(*leaves, softmax_scale, is_causal, left, right)
        grads = torch.autograd.grad(again, leaves, dout.double())
    return (*(g.to(q.dtype) for g in grads), torch.empty(0))


for name, schema, function in (("mha_fwd", FORWARD, mha_fwd), ("mha_bwd", BACKWARD, mha_bwd)):
    if schema is not None:
        LIBRARY.define(name + schema)
        LIBRARY.impl(name, function, "CPU")
"""


def write(folder: Path, forward: str | None = FORWARD, backward: str | None = BACKWARD) -> str:
    """The package in a folder of its own, once for all ranks; importing it registers the operators."""
    package = folder / "aiter" / "ops"
    package.mkdir(parents=True)
    (folder / "aiter" / "__init__.py").touch()
    (package / "__init__.py").touch()
    head = f"FORWARD = {forward!r}\nBACKWARD = {backward!r}\n"
    (package / "mha.py").write_text(head + _SOURCE)
    return str(folder)


def core_over(folder: str, *, read: bool = True) -> Any:
    """This process's AITER core over the package in `folder`, whose functions count among those that were read.

    Returns:
        `aiter_attention` with its operators given, and `operators`.
    """
    from megatron_plugins import aiter_operators
    from patches import fingerprint
    from patches.target import Target
    from te_overrides.kernels.attention.aiter import aiter_attention

    sys.path.insert(0, folder)
    if read:
        module = aiter_operators.MODULE
        text = (Path(folder) / "aiter" / "ops" / "mha.py").read_text()
        aiter_operators.SOURCES = {
            name: (fingerprint.of_source(text, Target.parse(f"{module}:{name}")) or "",)
            for name in ("mha_fwd", "mha_bwd")
        }
    operators = aiter_operators.operators
    return SimpleNamespace(
        aiter_attention=functools.partial(aiter_attention, operators=operators), operators=operators
    )
