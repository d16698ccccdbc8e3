"""Launching Triton kernels without paying for their binder on every call.

Triton examines each argument of each launch (type, alignment, equal to one) and compares every global that the kernel
uses: 50 to 70 microseconds for thirty arguments, more than a merge of 16 MB takes. All of it follows from the shapes,
strides, dtypes and alignments of the tensors. A caller makes that its key, decides everything once, and keeps the
launches; the next call with the same key goes straight to the compiled kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton

LIMIT = 4096
"""Launches that are kept: a job with ever new shapes or lengths must not grow, so all are forgotten there."""

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
    """Launches by key."""

    def __init__(self) -> None:
        self._known = dict[Any, Any]()

    def __call__(self, key: Any, make: Callable[..., Any], *arguments: Any) -> Any:
        """What `make(*arguments)` returned for this key; what it raises is raised every time."""
        try:
            return self._known[key]
        except KeyError:
            pass
        made = make(*arguments)
        if len(self._known) >= LIMIT:
            self._known.clear()
        self._known[key] = made
        return made


class Launcher:
    """One Triton kernel whose launches differ in numbers from call to call, so that no plan would be met twice.

    What decides which compiled kernel is meant (dtypes, alignments of tensors, all numbers by value, constants,
    options) is the key; no kernel is used with arguments that it was not specialized for. The kernel's parameters:
    first tensors, then numbers, then constants (`tl.constexpr`).

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


_HERE: AbstractContextManager[None] = nullcontext()


def device_of(x: torch.Tensor) -> AbstractContextManager[Any]:
    """Makes the device of `x` the current one if it is not."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(x.device)


@functools.cache
def threads_of_a_warp() -> int:
    """64 on the AMD GPUs of data centers, 32 on NVIDIA's; the interpreter does not care."""
    return 64 if torch.version.hip else 32


@functools.cache
def options(threads: int) -> dict[str, Any]:
    """Compiler options of a launch with so many threads a program."""
    return {"num_warps": threads // threads_of_a_warp(), "num_stages": 1, "enable_fp_fusion": False}


@functools.cache
def rounds_natively(function: Any) -> bool:
    """Whether a kernel may leave roundings to 16 bits to the GPU: NVIDIA's `cvt.rn` is round to nearest even.

    Not in Triton's interpreter, which truncates, and not on AMD, where the integers are what the audit has proved.
    """
    return isinstance(function, triton.JITFunction) and not torch.version.hip


def entry_options(entry: Any, hip: bool) -> dict[str, Any]:
    """Compiler options of a launch table's entry; all written out, none tuned at run time."""
    common: dict[str, Any] = {"num_warps": entry.num_warps, "num_stages": entry.num_stages}
    if hip:
        common |= {
            "matrix_instr_nonkdim": entry.nonkdim,
            "kpack": entry.kpack,
            "waves_per_eu": entry.waves_per_eu,
        }
    return common


def row_stride(x: torch.Tensor) -> int | None:
    """Elements between consecutive rows of [..., columns], or None where there is no such number.

    None: columns are not adjacent, or rows cannot be walked with one stride (a transposed batch).
    """
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        return None
    stride, rows = 0, 1
    for size, step in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        if size == 1:
            continue
        if rows == 1:
            stride = step
        elif step != stride * rows:
            return None
        rows *= size
    return stride if rows > 1 else x.shape[-1]


def with_rows(x: torch.Tensor) -> torch.Tensor:
    """`x` where its rows can be walked with one stride, else a contiguous copy."""
    return x if row_stride(x) is not None else x.contiguous()
