"""Launching Triton kernels without paying for their binder on every call.

Triton examines each argument of each launch (type, alignment, equal to one) and compares every global that the kernel
uses: 50 to 70 microseconds for thirty arguments, more than a merge of 16 MB takes. All of it follows from the shapes,
strides, dtypes and alignments of the tensors. A caller makes that its key, decides everything once, and keeps the
launches; the next call with the same key goes straight to the compiled kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton

Signature = tuple[torch.Size, tuple[int, ...], torch.dtype, int]


def signature(x: torch.Tensor) -> Signature:
    """What a compiled kernel depends on: tensors of one signature are interchangeable as arguments of a `Launch`."""
    return x.shape, x.stride(), x.dtype, x.data_ptr() % 16


class Launch:
    """A kernel with everything decided but its tensors, which are its first parameters.

    Args:
        function: the kernel, as `triton.jit` returns it; its parameters are tensors, then integers, then constants.
        grid: programs in three dimensions.
        integers, constants: values of the parameters after the tensors, in the kernel's order.
        options: compiler options, `num_warps` and so on.
    """

    def __init__(
        self,
        function: Any,
        grid: tuple[int, int, int],
        integers: Sequence[int],
        constants: dict[str, Any],
        options: dict[str, Any],
    ) -> None:
        self._function, self._grid = function, grid
        self._integers, self._constants, self._options = tuple(integers), constants, options
        self._rest = (*integers, *constants.values())
        self._compiled: Callable[..., None] | None = None

    def __call__(self, *tensors: torch.Tensor) -> None:
        """Launch on the current stream of the current device, which must be that of the tensors.

        From the second call on the tensors must have the signatures that those of the first call had.
        """
        if self._compiled is not None:
            self._compiled(*tensors, *self._rest)
            return
        compiled = self._function[self._grid](*tensors, *self._integers, **self._constants, **self._options)
        # Triton's interpreter replaces the decorator; it compiles nothing.
        if isinstance(self._function, triton.JITFunction):
            self._compiled = compiled[self._grid]


class Plans:
    """Launches by key; forgets all of them at `limit`, so that a job with ever new shapes does not grow."""

    def __init__(self, limit: int = 4096) -> None:
        self._limit, self._known = limit, dict[Any, Any]()

    def __call__(self, key: Any, make: Callable[..., Any], *arguments: Any) -> Any:
        """What `make(*arguments)` returned for this key; what it raises is raised every time."""
        try:
            return self._known[key]
        except KeyError:
            pass
        made = make(*arguments)
        if len(self._known) >= self._limit:
            self._known.clear()
        self._known[key] = made
        return made
