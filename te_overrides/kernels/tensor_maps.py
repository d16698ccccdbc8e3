"""Launching Gluon kernels for Hopper that read and write tiles through the tensor memory accelerator.

Triton's `TensorDescriptor` examines itself whenever one is made: ten microseconds, three times a product. Shapes,
strides, blocks and layouts follow from the signatures of the tensors, so a plan examines them once and afterwards
hands on descriptors that hold another address and are otherwise the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


class Descriptor:
    """What Triton's launcher reads of a `TensorDescriptor`, not examined."""

    __slots__ = ("base", "block_shape", "layout", "shape", "strides")
    padding = "zero"
    round_f32_to_tf32 = False
    mode = "tiled"

    def __init__(
        self,
        base: torch.Tensor,
        shape: Sequence[int],
        strides: Sequence[int],
        block: Sequence[int],
        layout: Any,
    ) -> None:
        self.base, self.shape, self.strides, self.block_shape, self.layout = (
            base,
            shape,
            strides,
            block,
            layout,
        )

    def examined(self) -> TensorDescriptor:
        """The same as Triton's own.

        Raises:
            AssertionError: Triton's, for strides or an address that the hardware cannot have.
        """
        return TensorDescriptor(
            self.base, list(self.shape), list(self.strides), list(self.block_shape), self.layout
        )


class TensorMap(NamedTuple):
    """A descriptor without its address: sizes and strides in elements, contiguous dimension last."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]
    layout: Any

    def at(self, base: torch.Tensor) -> Descriptor:
        """The descriptor of a tensor that lies like this."""
        return Descriptor(base, self.shape, self.strides, self.block, self.layout)


class MappedLaunch:
    """As `launching.Launch`, with tensors that the kernel takes as descriptors.

    Args:
        function: the kernel, as `gluon.jit` returns it; its parameters are tensors, then integers, then constants.
        programs: how many, in one dimension.
        maps: for each tensor its map, or None for one that is passed as a pointer.
        integers, constants: values of the parameters after the tensors, in the kernel's order.
        options: compiler options, `num_warps` and so on.
    """

    def __init__(
        self,
        function: Any,
        programs: int,
        maps: Sequence[TensorMap | None],
        integers: Sequence[int],
        constants: dict[str, Any],
        options: dict[str, Any],
    ) -> None:
        self._function, self._grid, self._maps = function, (programs, 1, 1), tuple(maps)
        self._integers, self._constants, self._options = tuple(integers), constants, options
        self._rest = (*integers, *constants.values())
        self._compiled: Callable[..., None] | None = None

    def __call__(self, *tensors: torch.Tensor) -> None:
        """Launch on the current stream of the current device; signatures as in the first call."""
        arguments: list[Any] = [
            x if m is None else Descriptor(x, m.shape, m.strides, m.block, m.layout)
            for x, m in zip(tensors, self._maps, strict=True)
        ]
        if self._compiled is not None:
            self._compiled(*arguments, *self._rest)
            return
        examined = [x.examined() if isinstance(x, Descriptor) else x for x in arguments]
        self._compiled = self._function[self._grid](
            *examined, *self._integers, **self._constants, **self._options
        )[self._grid]
