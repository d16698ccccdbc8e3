"""Versions of upstream distributions, found beside the code that is actually used."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from patches.errors import RegistryError

if TYPE_CHECKING:
    from pathlib import Path

_OPERATORS = {
    ">=": lambda a, b: a >= b,
    "<=": lambda a, b: a <= b,
    "==": lambda a, b: a == b,
    ">": lambda a, b: a > b,
    "<": lambda a, b: a < b,
}


def release(version: str) -> tuple[int, ...]:
    """Leading numbers of a version, trailing zeros dropped: ``2.4.0+rocm`` is (2, 4)."""
    match = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in match[0].split(".")] if match else [0]
    while len(numbers) > 1 and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def among(version: str | None, releases: Iterable[str]) -> bool:
    """Whether `version` is one of `releases`, a build of one (``2.16.0.dev0+abc``) included; None is none of them."""
    return version is not None and release(version) in {release(known) for known in releases}


def matches(version: str, specifier: str) -> bool:
    """Whether `version` satisfies ``>=2.3,<2.20``; an empty specifier takes all.

    Raises:
        RegistryError: a specifier of another form.
    """
    for clause in filter(None, (part.strip() for part in specifier.split(","))):
        match = re.fullmatch(r"(>=|<=|==|>|<)\s*([\d.]+)", clause)
        if match is None:
            raise RegistryError(
                f"version specifier {specifier!r}: {clause!r} is not one of {sorted(_OPERATORS)} and a number"
            )
        if not _OPERATORS[match[1]](release(version), release(match[2])):
            return False
    return True


def beside(file: Path, module: str, distribution: str) -> str | None:
    """Version of `distribution` from the metadata beside the package that holds `file`, or None.

    Looked up beside the file, not in the environment: a process may run an unpacked wheel while another version is
    installed. A wheel leaves ``NAME-VERSION.dist-info``, a source tree installed in place ``NAME.egg-info/PKG-INFO``,
    an egg ``EGG-INFO/PKG-INFO`` in a folder of its own.
    """
    levels = module.count(".") + (1 if file.name == "__init__.py" else 0)
    return _in(file.resolve().parents[levels], distribution)


def around(file: Path, distributions: Iterable[str]) -> str | None:
    """Version of the distribution that holds a compiled `file`: the first of `distributions` that has metadata.

    Looked up in its folder and the two above: a package may keep its compiled modules in a folder of their own
    (``transformer_engine/wheel_lib``).
    """
    found = (_in(root, name) for name in distributions for root in file.resolve().parents[:3])
    return next((version for version in found if version is not None), None)


def _in(root: Path, distribution: str) -> str | None:
    wanted = _normalized(distribution)
    for info in sorted(root.glob("*.dist-info")):
        name, _, version = info.name.removesuffix(".dist-info").partition("-")
        if _normalized(name) == wanted:
            return version
    for metadata in sorted([*root.glob("*.egg-info/PKG-INFO"), *root.glob("EGG-INFO/PKG-INFO")]):
        # Headers end at the first empty line; the description follows.
        headers = metadata.read_text(encoding="utf-8").partition("\n\n")[0]
        fields = dict(re.findall(r"^(Name|Version): *(\S+)", headers, re.MULTILINE))
        if _normalized(fields.get("Name", "")) == wanted:
            return fields.get("Version")
    return None


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "_", name).lower()
