"""Keeps a compiler around the caller from compiling arithmetic whose roundings are counted.

The references write one rounding per operation by writing one torch operation per rounding. A compiler that traces
through them fuses a multiply and an add into one loop, where a contraction into fma removes a rounding: attention
traced by inductor for a CPU differed in 3,283 of 9,216 elements of `out`. A model is compiled by its user, by
`jit_fuser` or by a recipe, so a reference cannot assume that it is not.

`torch.compiler.disable` as a decorator would do, at the price of importing the compiler into every process. Whoever
compiles has imported it by then; so the question is asked at the call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])


def eager_only(function: _Function) -> _Function:
    """Decorate `function` so that a surrounding `torch.compile` calls it instead of tracing it.

    Under `fullgraph=True` the compiler raises its own error, which names the function.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return cast(_Function, call)
