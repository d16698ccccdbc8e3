"""Launching a Triton kernel without paying for its binder on every call.

Triton examines each argument of each launch (type, alignment, equal to one) and compares every global that the kernel
uses: 50 to 70 microseconds for thirty arguments, more than a merge of 16 MB takes. What decides which compiled kernel
is meant is known here: dtypes and alignments of the tensors, the values of the integers, the constants. They are the
key of a dictionary; a hit goes straight to the compiled kernel. All integers are in the key by value, so that no kernel
is ever used with arguments it was not specialized for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton


class Launcher:
    """One Triton kernel. Its parameters: first tensors, then integers, then constants (`tl.constexpr`).

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
        integers: Sequence[int],
        constants: dict[str, Any],
        options: dict[str, Any],
    ) -> None:
        """Launch on the current stream of the tensors' device.

        Args:
            grid: programs in three dimensions.
            tensors, integers, constants: values of the parameters, in the kernel's order.
            options: compiler options, `num_warps` and so on.
        """
        if not self._compiles:
            self.function[grid](*tensors, *integers, **constants, **options)
            return
        device = tensors[0].device
        if device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                self(grid, tensors, integers, constants, options)
            return
        key = (
            device.index,
            *[(x.dtype, x.data_ptr() % 16) for x in tensors],
            *integers,
            *constants.values(),
            *options.values(),
        )
        compiled = self._known.get(key)
        if compiled is None:
            self._known[key] = self.function[grid](*tensors, *integers, **constants, **options)
        else:
            compiled[grid](*tensors, *integers, *constants.values())
