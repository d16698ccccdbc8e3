"""Launching an attention kernel without paying for Triton's binder on every call.

Attention's launches differ in numbers from call to call (positions, lengths, tables), so they are not planned once a
signature as in `te_overrides/kernels/launching.py`: what decides which compiled kernel is meant (dtypes, alignments of
tensors, all numbers by value, constants, options) is the key of a dictionary, and a hit goes straight to the kernel. No
kernel is ever used with arguments that it was not specialized for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton

# A job with ever new lengths must not grow: the dictionary starts again.
LIMIT = 4096


class Launcher:
    """One Triton kernel. Its parameters: first tensors, then numbers, then constants (`tl.constexpr`).

    Args:
        function: the kernel, as `triton.jit` returns it.
    """

    def __init__(self, function: Any) -> None:
        self.function = function
        # Triton's interpreter replaces the decorator; it compiles nothing.
        self._compiles = isinstance(function, triton.JITFunction)
        self._known: dict[tuple[Any, ...], Any] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: Sequence[torch.Tensor],
        numbers: Sequence[int | float],
        constants: dict[str, Any],
        options: dict[str, Any],
    ) -> None:
        """Launch on the current stream of the tensors' device.

        Args:
            grid: programs in three dimensions.
            tensors, numbers, constants: values of the parameters, in the kernel's order.
            options: compiler options, `num_warps` and so on.
        """
        if not self._compiles:
            self.function[grid](*tensors, *numbers, **constants, **options)
            return
        device = tensors[0].device
        if device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                self(grid, tensors, numbers, constants, options)
            return
        key = (
            device.index,
            *[(x.dtype, x.data_ptr() % 16) for x in tensors],
            *numbers,
            *constants.values(),
            *options.values(),
        )
        compiled = self._known.get(key)
        if compiled is None:
            if len(self._known) >= LIMIT:
                self._known.clear()
            self._known[key] = self.function[grid](*tensors, *numbers, **constants, **options)
        else:
            compiled[grid](*tensors, *numbers, *constants.values())
