"""Find a kernel the user names, `path/to/file.py:kernel`, and what its parameters are.

Types come from `--arg name=type` first, then from the parameter's annotation, then from its name: `…_ptr` is a
float32 pointer, anything else an int32. A wrong guess makes Triton's compiler complain, or the audit answer for
another type, so what was assumed is printed.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from te_overrides.audit.compile import Kernel

__all__ = ["guess_signature", "kernel_from_file"]

_BLOCK = re.compile(r"(X?BLOCK(_SIZE)?(_[NMX])?|BLOCK_ELEMENTS)$")


def guess_signature(fn: Any, constexprs: Sequence[str], given: Mapping[str, str]) -> dict[str, str]:
    """Types of the parameters that are not constexprs."""
    strange = sorted(set(given) - set(fn.arg_names))
    if strange:
        raise ValueError(f"{fn.__name__} has no parameters {strange}; it has {list(fn.arg_names)}")
    signature = {}
    for parameter in fn.params:
        name = parameter.name
        if name in constexprs or parameter.is_constexpr:
            continue
        annotated = parameter.annotation_type
        fallback = "*fp32" if re.search(r"(ptr|pointer)s?$", name) else "i32"
        signature[name] = given.get(name) or annotated or fallback
    return signature


def kernel_from_file(
    target: str,
    types: Mapping[str, str],
    scalars: Mapping[str, int | float],
    constexprs: Mapping[str, Any],
    swept: Sequence[str],
    block: str | None = None,
    sizes: Mapping[str, int] | None = None,
) -> Kernel:
    """Load `path/to/file.py:kernel`.

    Args:
        types, scalars, constexprs: what is known of the parameters.
        swept: constexprs the launch grid varies.
        block: the constexpr that splits the elements over programs; found by its name if None.

    Raises:
        ValueError: no such file or kernel, a constexpr without a value, or no block parameter recognized.
    """
    path, separator, name = target.rpartition(":")
    if not separator or not Path(path).is_file():
        raise ValueError(f"expected path/to/file.py:kernel with an existing file, got {target!r}")
    spec = importlib.util.spec_from_file_location(f"audited_{Path(path).stem}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(Path(path).resolve().parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    kernels = sorted(key for key, value in vars(module).items() if hasattr(value, "cache_key"))
    if name not in kernels:
        raise ValueError(f"{path} has no @triton.jit kernel {name!r}; it has {', '.join(kernels) or 'none'}")
    fn = getattr(module, name)
    needed = [parameter.name for parameter in fn.params if parameter.is_constexpr]
    block = block or next((key for key in needed if _BLOCK.search(key)), None)
    if block is None:
        raise ValueError(f"{name}: say with --block which constexpr splits the elements; it has {needed}")
    given = {*constexprs, *swept}
    defaults = {parameter.name for parameter in fn.params if parameter.has_default}
    missing = [key for key in needed if key not in given and key not in defaults]
    if missing:
        raise ValueError(f"{name}: give a value with --constexpr or --grid for {missing}")
    filled = dict(constexprs)
    for parameter in fn.params:
        if parameter.is_constexpr and parameter.name not in given and parameter.has_default:
            filled[parameter.name] = parameter.default
    signature = guess_signature(fn, [*given], types)
    return Kernel(fn, signature, scalars, filled, block, sizes or {})
