"""One override, applied: upstream's function is looked at, replaced if it was reviewed, and entered in the ledger."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from patches import binding, fingerprint, versions
from patches.errors import DriftError
from patches.ledger import APPLIED, NOT_REQUIRED, Entry, Ledger
from patches.override import ALIAS, BINDING, Override

MARK = "__deterministic_rocm__"
"""Attribute of a replacement: the id of its override."""

WAYS_ON = (
    "Ways on: (1) review the change, then accept it with `python -m patches pin {id}`; (2) install an upstream release "
    "listed above; (3) run without --deterministic-rocm."
)


def _noting_calls(entry: Entry, function: FunctionType) -> FunctionType:
    """`function`, which says in the ledger that it was called.

    The mark is stored, never read: torch.compile then has nothing to guard on and compiles once. Counting would read.
    """

    def noting(*args: Any, **kwargs: Any) -> Any:
        entry.called = True
        return function(*args, **kwargs)

    return noting  # type: ignore[return-value]


def apply(override: Override, module: ModuleType, ledger: Ledger) -> None:
    """Replace the target of `override`, whose module has just executed, and say so in the ledger.

    Raises:
        DriftError: upstream's function is not the code that was reviewed.
        Exception: whatever the override's `build` raises.
    """
    file = Path(module.__file__ or "")
    version = versions.beside(file, module.__name__, override.distribution)
    holder = sys.modules.get(override.target.module)
    if holder is None:
        absence = f"no module {override.target.module} after {override.trigger} was imported"
        raise DriftError(_drift(ledger, override, version, absence))
    original = override.target.value(holder)
    if original is None:
        if version is not None and override.versions and not versions.matches(version, override.versions):
            reason = (
                f"{override.distribution} {version} has no such function (it exists in {override.versions})"
            )
            ledger.move(override.id, NOT_REQUIRED, reason, version=version)
            return
        left_out = binding.left_out(override, file, version, ledger.lock.accepted(str(override.target)))
        if left_out is not None:
            ledger.move(override.id, NOT_REQUIRED, left_out, version=version)
            return
        absence = f"no {override.target.qualname} in {holder.__file__ or file}"
        if version is None and override.versions:
            # Whether this release ought to have it cannot be told, and pinning cannot help.
            absence += (
                f" (it exists in {override.versions}; to say which release this is, install it: no .dist-info "
                "or .egg-info lies beside the package)"
            )
        raise DriftError(_drift(ledger, override, version, absence))
    if getattr(original, MARK, None) == override.id:
        return
    if override.mended is not None and (reason_mended := override.mended(module)) is not None:
        ledger.move(override.id, NOT_REQUIRED, reason_mended, version=version)
        return
    if override.kind == BINDING:
        found = _reviewed_binding(ledger, override, holder, original, version)
    else:
        found = _reviewed_source(ledger, override, file, version)
    replacement = override.build(original)
    entry = ledger.entries[override.id]
    static = isinstance(replacement, staticmethod)
    function = replacement.__func__ if static else replacement
    if isinstance(function, FunctionType):
        entry.called = bool(entry.called)
        function = _noting_calls(entry, function)
    # Also where the replacement is a wrapper of its own: `__wrapped__` leads to upstream's function.
    upstream = original.__func__ if isinstance(original, staticmethod) else original
    functools.update_wrapper(function, upstream, updated=())
    replacement = staticmethod(function) if static else function
    for marked in (function, replacement):
        setattr(marked, MARK, override.id)
    setattr(override.target.owner(holder), override.target.name, replacement)
    for name in override.reexports:
        other = sys.modules.get(name)
        if other is not None and vars(other).get(override.target.name) is original:
            setattr(other, override.target.name, replacement)
    ledger.move(
        override.id,
        APPLIED,
        fingerprint=found,
        version=version,
        original=original,
        replacement=replacement,
    )


def _reviewed_source(ledger: Ledger, override: Override, file: Path, version: str | None) -> str:
    alias = override.kind == ALIAS
    found = fingerprint.of_source(file.read_text(), override.target, override.also, alias)
    if found is None:
        verb = "assigned" if alias else "defined"
        absence = f"{override.target.qualname} is bound in {file}, but not {verb} there"
        raise DriftError(_drift(ledger, override, version, absence))
    if found not in ledger.lock.accepted(str(override.target)):
        raise DriftError(_drift(ledger, override, version, f"{found} in {file}"))
    return found


def _reviewed_binding(
    ledger: Ledger, override: Override, holder: ModuleType, original: Any, version: str | None
) -> str:
    found, refusal = binding.look(override, holder, original, version)
    if found is None or refusal is not None:
        raise DriftError(_drift(ledger, override, version, refusal or "no signature"))
    if not versions.among(version, ledger.lock.accepted(str(override.target)).get(found, ())):
        raise DriftError(_drift(ledger, override, version, found))
    return found


def _drift(ledger: Ledger, override: Override, version: str | None, found: str) -> str:
    accepted = ledger.lock.accepted(str(override.target))
    expected = "; ".join(f"{print_} ({', '.join(releases)})" for print_, releases in accepted.items())
    return (
        f"override {override.id}: upstream's {override.target} is not the code that was reviewed. "
        f"Sought {expected or 'a fingerprint, but none was ever pinned'}. Found {found}, "
        f"{override.distribution} {version or 'of unknown version'}. " + WAYS_ON.format(id=override.id)
    )
