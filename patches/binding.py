"""Is it the compiled function that was reviewed? Its signature, as pybind11 writes it, in a release that was reviewed.

A compiled module has no source to hash. What it has is the first line of a function's docstring, which pybind11 makes
from the C++ declaration (``name(arg0: torch.Tensor, arg1: bool) -> None``), and the release of its package. Neither
alone is enough: a signature says nothing about the body behind it, a release nothing about a build that was patched.
Both together are the fingerprint, so a new release is always drift, to be reviewed.
"""

from __future__ import annotations

import re
from typing import Any

PREFIX = "binding:"
_SIGNATURE = re.compile(r"\w+(\(.*\) -> .+)")


def of_function(function: Any) -> str | None:
    """``binding:(arg0: torch.Tensor) -> None``; None where no signature can be read, overloaded functions included."""
    lines = (getattr(function, "__doc__", None) or "").strip().splitlines()
    if not lines or "Overloaded function." in lines:
        return None
    match = _SIGNATURE.fullmatch(" ".join(lines[0].split()))
    return None if match is None else PREFIX + match[1]


def parameters(fingerprint: str) -> int:
    """Number of parameters in a fingerprint of this kind."""
    inside = fingerprint.removeprefix(PREFIX).partition("(")[2].rpartition(") -> ")[0]
    depth, count = 0, 1 if inside.strip() else 0
    for character in inside:
        depth += (character in "([{") - (character in ")]}")
        count += character == "," and depth == 0
    return count
