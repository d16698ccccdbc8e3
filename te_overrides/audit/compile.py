"""Compile a Triton kernel for an AMD target, without the GPU, over a grid of launch configurations.

Triton's AMD backend and its device library are in the wheel, so `triton.compile` gives the code a gfx942 or
gfx950 would run on any machine. What is kept is text: the assembly and the TTGIR, in `.cache/audit/` (or
`DETERMINISTIC_ROCM_AUDIT_CACHE`), under a key made of the Triton version, the kernel's source with everything it
calls, the target and every option.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["ARCHITECTURES", "Compiled", "Kernel", "Launch", "compile_kernel", "launch_grid"]

# Target: lanes of a wave.
ARCHITECTURES = {"gfx942": 64, "gfx950": 64, "gfx90a": 64, "gfx1100": 32}

_OPTIONS = ("num_warps", "num_stages", "waves_per_eu", "matrix_instr_nonkdim", "kpack", "enable_fp_fusion")


@dataclass(frozen=True)
class Launch:
    """One launch configuration: values of the kernel's constexpr parameters, and compiler options."""

    constexprs: tuple[tuple[str, Any], ...]
    options: tuple[tuple[str, Any], ...]

    @property
    def num_warps(self) -> int:
        return int(dict(self.options).get("num_warps", 4))

    def constexpr(self, name: str) -> Any:
        return dict(self.constexprs)[name]

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in (*self.constexprs, *self.options))


@dataclass(frozen=True)
class Kernel:
    """A Triton kernel and how it is called.

    Args:
        fn: the `@triton.jit` function.
        signature: type of each parameter that is not a constexpr, e.g. `{"x_ptr": "*fp32", "n": "i32"}`.
        scalars: values of the parameters that are neither pointers nor constexprs, or functions of the launch
            and the number of elements; integers default to the number of elements audited.
        constexprs: constexprs that are the same in every launch.
        block: the constexpr that says how many elements one program handles.
        programs: number of programs of a launch, from it and the elements; elements / block, rounded up, unless given.
        sizes: elements of a pointer's buffer as a multiple of the elements audited (1 unless given).
    """

    fn: Any
    signature: Mapping[str, str]
    scalars: Mapping[str, int | float | Callable[[Launch, int], int]] = field(default_factory=dict)
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    block: str = "XBLOCK"
    sizes: Mapping[str, int] = field(default_factory=dict)
    programs: Callable[[Launch, int], int] | None = None

    def __post_init__(self) -> None:
        names = set(self.fn.arg_names)
        strange = (set(self.signature) | set(self.constexprs)) - names
        if strange:
            raise ValueError(f"{self.name} has no parameters {sorted(strange)}; it has {self.fn.arg_names}")

    @property
    def name(self) -> str:
        return str(self.fn.__name__)

    @property
    def pointers(self) -> tuple[str, ...]:
        return tuple(name for name in self.fn.arg_names if self.signature.get(name, "").startswith("*"))


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of one launch configuration."""

    assembly: str
    ttgir: str
    shared: int


def launch_grid(axes: Mapping[str, Sequence[Any]]) -> list[Launch]:
    """Every combination of `axes`, e.g. `{"XBLOCK": (256, 1024), "num_warps": (4, 8)}`.

    Names Triton knows as compiler options become options, the others constexprs.
    """
    launches = []
    for values in itertools.product(*axes.values()):
        pairs = tuple(zip(axes, values, strict=True))
        launches.append(
            Launch(
                tuple(pair for pair in pairs if pair[0] not in _OPTIONS),
                tuple(pair for pair in pairs if pair[0] in _OPTIONS),
            )
        )
    return launches


def _cache_file(kernel: Kernel, arch: str, launch: Launch, divisible: tuple[str, ...], version: str) -> Path:
    key = json.dumps(
        [version, kernel.fn.cache_key, arch, sorted(kernel.signature.items()), divisible,
         sorted(map(str, kernel.constexprs.items())), str(launch)]
    )  # fmt: skip
    folder = Path(os.environ.get("DETERMINISTIC_ROCM_AUDIT_CACHE", ".cache/audit"))
    return folder / f"{kernel.name}-{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"


def compile_kernel(kernel: Kernel, arch: str, launch: Launch, divisible: tuple[str, ...] = ()) -> Compiled:
    """Compile `kernel` for `arch`.

    Args:
        divisible: scalar parameters known to be multiples of 16, as Triton specializes them at run time
            (pointers are taken to be aligned to 16 bytes).

    Raises:
        ValueError: `arch` is not one of ARCHITECTURES.
        triton.CompilationError: Triton refuses the kernel for this launch.
    """
    if arch not in ARCHITECTURES:
        raise ValueError(f"unknown target {arch!r}; known are {', '.join(ARCHITECTURES)}")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    path = _cache_file(kernel, arch, launch, divisible, triton.__version__)
    if path.exists():
        return Compiled(**json.loads(path.read_text()))
    constexprs = dict(kernel.constexprs) | dict(launch.constexprs)
    names = list(kernel.fn.arg_names)
    signature = {name: "constexpr" if name in constexprs else kernel.signature[name] for name in names}
    attrs = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if name in kernel.pointers or name in divisible
    }
    source = ASTSource(fn=kernel.fn, signature=signature, constexprs=constexprs, attrs=attrs)
    # Contraction is on unless the launch says otherwise, whatever this version of Triton defaults to.
    options = {"enable_fp_fusion": True} | dict(launch.options)
    built = triton.compile(source, target=GPUTarget("hip", arch, ARCHITECTURES[arch]), options=options)
    compiled = Compiled(built.asm["amdgcn"], built.asm["ttgir"], int(built.metadata.shared))
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(compiled.__dict__))
    partial.replace(path)
    return compiled
