"""Is it the compiled function that was reviewed? Its signature, as pybind11 writes it, in a release that was reviewed.

A compiled module has no source to hash. What it has is the first line of a function's docstring, which pybind11 makes
from the C++ declaration (``name(arg0: torch.Tensor, arg1: bool) -> None``), and the release of its package. Neither
alone is enough: a signature says nothing about the body behind it, a release nothing about a build that was patched.
Both together are the fingerprint, so a new release is always drift, to be reviewed.
"""

from __future__ import annotations

import importlib.machinery
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from patches import versions
from patches.override import Override

PREFIX = "binding:"
_SIGNATURE = re.compile(r"\w+(\(.*\) -> .+)")


class Look(NamedTuple):
    """A compiled function that is loaded: its fingerprint, and why it can be neither accepted nor pinned."""

    found: str | None
    refusal: str | None


def of_function(function: Any) -> str | None:
    """``binding:(arg0: torch.Tensor) -> None``; None where no signature can be read, overloaded functions included."""
    lines = (getattr(function, "__doc__", None) or "").strip().splitlines()
    if not lines or "Overloaded function." in lines:
        return None
    match = _SIGNATURE.fullmatch(" ".join(lines[0].split()))
    return None if match is None else PREFIX + match[1]


def look(override: Override, holder: ModuleType, function: Any, version: str | None) -> Look:
    """Look at a function of a module that has been loaded.

    Args:
        holder: the compiled module.
        function: what its name is bound to.
        version: release of the Python package that calls it. A process may run one release's Python over another's
            compiled module, so the release of the latter is read beside its own file and must be the same.
    """
    found = of_function(function)
    if found is None:
        return Look(
            None, "a function whose docstring does not begin with one signature, as pybind11 writes it"
        )
    if holder.__file__ is None:
        return Look(found, f"{found} in a module without a file, whose release cannot be told")
    held = versions.around(Path(holder.__file__), (override.target.module, override.distribution))
    if held is None:
        nothing = "whose release cannot be told: no .dist-info or .egg-info lies around it"
        return Look(found, f"{found} in {holder.__file__}, {nothing}")
    if version is None or versions.release(held) != versions.release(version):
        return Look(found, f"{found} in {holder.__file__} of release {held}, called by another release")
    return Look(found, None)


def left_out(
    override: Override, caller: Path, version: str | None, accepted: dict[str, list[str]]
) -> str | None:
    """Why it is fine that a compiled module lacks the function, or None.

    It is where the declaration expects such builds, the release was reviewed, and the calling module still names the
    function: it was not renamed, and whoever calls it gets an AttributeError, not other bits.
    """
    reviewed = any(versions.among(version, releases) for releases in accepted.values())
    if not override.absent or not override.after or not reviewed:
        return None
    if re.search(rf"\.{override.target.name}\b", caller.read_text()) is None:
        return None
    module = override.target.module
    return f"this build of {module} has no {override.target.name}, a call is an AttributeError: {override.absent}"


def compiled_file(module: str, tree: Path | None = None) -> Path | None:
    """The file of a compiled module, found by looking, not by importing; arguments as `fingerprint.source_file`."""
    *folders, name = module.split(".")
    for entry in [tree] if tree is not None else [Path(p or ".") for p in sys.path]:
        for suffix in importlib.machinery.EXTENSION_SUFFIXES:
            file = entry.joinpath(*folders, name + suffix)
            if file.is_file():
                return file
    return None


def parameters(fingerprint: str) -> int:
    """Number of parameters in a fingerprint of this kind."""
    inside = fingerprint.removeprefix(PREFIX).partition("(")[2].rpartition(") -> ")[0]
    depth, count = 0, 1 if inside.strip() else 0
    for character in inside:
        depth += (character in "([{") - (character in ")]}")
        count += character == "," and depth == 0
    return count
