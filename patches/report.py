"""What status, check, explain and pin look at: declarations against the code that is installed, without
importing it."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patches import binding, catalogue, fingerprint, versions
from patches.arming import current_ledger
from patches.lock import Lock
from patches.override import ALIAS, BINDING, Override
from patches.registry import REGISTRY

NOT_ARMED = "NOT_ARMED"


@dataclass(frozen=True)
class Finding:
    """One override against one source tree.

    `verdict`: "accepted", "drifted", "absent" (the module is there, the target is not, although this version should
    have it), "outside" (this version need not have it), "not installed", "not checkable here" (a compiled function of a
    release that was reviewed; its signature is seen where the compiled module is loaded), "left out" (of this build, as
    the declaration expects; `reason` says why). `refusal`: why a compiled function that is loaded can be neither
    accepted nor pinned.
    """

    override: Override
    verdict: str
    found: str | None
    version: str | None
    file: Path | None
    accepted: dict[str, list[str]]
    refusal: str | None = None
    reason: str = ""

    @property
    def moved(self) -> bool:
        """Whether an armed run would refuse this code."""
        return self.verdict in ("drifted", "absent")

    def sentence(self) -> str:
        """The finding for people."""
        target, where = (
            self.override.target,
            f"{self.override.distribution} {self.version or '(unknown version)'}",
        )
        if self.verdict == "accepted":
            return f"{target}: as reviewed, {where}"
        if self.verdict == "not installed":
            return f"{target}: {self.override.distribution} is not there"
        if self.verdict == "not checkable here":
            return (
                f"{target}: not checkable here: compiled code, which has no source to compare. {where} was reviewed; "
                "the signature is compared where the compiled package is installed, by an armed run when it loads the "
                "module, or by `python -m patches check --load`"
            )
        if self.verdict == "left out":
            return f"{target}: {self.reason} ({where})"
        if self.verdict == "outside":
            return f"{target}: not in {where}; it exists in {self.override.versions}"
        expected = (
            ", ".join(f"{p} ({', '.join(v)})" for p, v in self.accepted.items()) or "nothing pinned yet"
        )
        missing = "a release that was not reviewed" if self.override.kind == BINDING else "no such function"
        found = self.refusal or self.found or missing
        return f"{target}: MOVED in {where} ({self.file}). Sought {expected}; found {found}."


def examine(override: Override, lock: Lock, tree: Path | None = None) -> Finding:
    """Compare the source that is installed, or lies in `tree`, with the reviewed fingerprints."""
    accepted = lock.accepted(str(override.target))
    file = _file(override, tree)
    if file is None:
        return Finding(override, "not installed", None, None, None, accepted)
    version = versions.beside(file, override.trigger, override.distribution)
    if override.kind == BINDING:
        return _examine_binding(override, version, file, accepted, tree)
    found = fingerprint.of_source(file.read_text(), override.target, override.also, override.kind == ALIAS)
    if found is None:
        outside = version is not None and not versions.matches(version, override.versions)
        return Finding(override, "outside" if outside else "absent", None, version, file, accepted)
    return Finding(override, "accepted" if found in accepted else "drifted", found, version, file, accepted)


def _examine_binding(
    override: Override, version: str | None, file: Path, accepted: dict[str, list[str]], tree: Path | None
) -> Finding:
    """A compiled function can be looked at where its module is loaded in this process, and nowhere else."""
    if version is not None and not versions.matches(version, override.versions):
        return Finding(override, "outside", None, version, file, accepted)
    module = sys.modules.get(override.target.module) if tree is None else None
    if module is not None:
        function = override.target.value(module)
        if function is None:
            left_out = binding.left_out(override, file, version, accepted)
            if left_out is not None:
                return Finding(override, "left out", None, version, file, accepted, None, left_out)
            return Finding(override, "absent", None, version, file, accepted, "no such function")
        found, refusal = binding.look(override, module, function, version)
        known = refusal is None and versions.among(version, accepted.get(found or "", []))
        return Finding(override, "accepted" if known else "drifted", found, version, file, accepted, refusal)
    reviewed = any(versions.among(version, releases) for releases in accepted.values())
    return Finding(override, "not checkable here" if reviewed else "drifted", None, version, file, accepted)


def _file(override: Override, tree: Path | None = None) -> Path | None:
    """The file of the module after whose execution an override is applied."""
    file = fingerprint.source_file(override.trigger, tree)
    if file is None and override.kind == BINDING:
        file = binding.compiled_file(override.trigger, tree)
    return file


def load(override: Override) -> str | None:
    """Import what makes a binding or an operator present, if its package is installed; what went wrong, in words."""
    if _file(override) is None:
        return None
    try:
        importlib.import_module(override.trigger)
    except (ImportError, RuntimeError, OSError, AssertionError) as error:
        return (
            f"sought to import {override.trigger}, to see what is compiled; found {type(error).__name__}: {error}. "
            "Run this where the compiled package is installed, on a machine that it runs on"
        )
    return None


def overrides(ids: list[str] | None = None) -> list[Override]:
    """All declared overrides, or those named. Raises RegistryError for an unknown id."""
    catalogue.declare_all()
    return [REGISTRY.get(id) for id in ids] if ids else list(REGISTRY)


def status() -> list[dict[str, Any]]:
    """One row an override: id, target, state, fingerprint, why, and more. Works armed and unarmed, without torch."""
    lock, ledger, rows = Lock.read(), current_ledger(), []
    for override in overrides():
        finding = examine(override, lock)
        entry = ledger.entries.get(override.id) if ledger is not None else None
        rows.append(
            {
                "id": override.id,
                "target": str(override.target),
                "state": entry.state if entry is not None else NOT_ARMED,
                "reason": entry.reason if entry is not None else None,
                "called": entry.called if entry is not None else None,
                "modes": list(override.modes),
                "fingerprint": finding.found,
                "installed": finding.verdict,
                "version": finding.version,
                "accepted": finding.accepted,
                "why": override.why,
            }
        )
    return rows
