"""What status, check, explain and pin look at: declarations against the code that is installed, without
importing it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patches import catalogue, fingerprint, versions
from patches.arming import current_ledger
from patches.lock import Lock
from patches.override import Override
from patches.registry import REGISTRY

NOT_ARMED = "NOT_ARMED"


@dataclass(frozen=True)
class Finding:
    """One override against one source tree.

    `verdict`: "accepted", "drifted", "absent" (the module is there, the target is not, although this version should
    have it), "outside" (this version need not have it), "not installed".
    """

    override: Override
    verdict: str
    found: str | None
    version: str | None
    file: Path | None
    accepted: dict[str, list[str]]

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
        if self.verdict == "outside":
            return f"{target}: not in {where}; it exists in {self.override.versions}"
        expected = (
            ", ".join(f"{p} ({', '.join(v)})" for p, v in self.accepted.items()) or "nothing pinned yet"
        )
        return f"{target}: MOVED in {where} ({self.file}). Sought {expected}; found {self.found or 'no such function'}."


def examine(override: Override, lock: Lock, tree: Path | None = None) -> Finding:
    """Compare the source that is installed, or lies in `tree`, with the reviewed fingerprints."""
    accepted = lock.accepted(str(override.target))
    file = fingerprint.source_file(override.target.module, tree)
    if file is None:
        return Finding(override, "not installed", None, None, None, accepted)
    version = versions.beside(file, override.target.module, override.distribution)
    found = fingerprint.of_source(file.read_text(), override.target, override.also)
    if found is None:
        outside = version is not None and not versions.matches(version, override.versions)
        return Finding(override, "outside" if outside else "absent", None, version, file, accepted)
    return Finding(override, "accepted" if found in accepted else "drifted", found, version, file, accepted)


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
