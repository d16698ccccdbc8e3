"""``overrides.lock.json``: for every target the fingerprints that were reviewed, and the releases they came from."""

from __future__ import annotations

import json
import os

from patches.errors import LockError
from patches.versions import release

PATH = os.path.join(os.path.dirname(__file__), "overrides.lock.json")
SCHEMA = 2
READABLE = (1, SCHEMA)
DERIVED = "derived from source"
"""Key of an entry: releases whose fingerprint was derived from upstream's source, not seen in a build (schema 2)."""


class Lock:
    """Accepted fingerprints: target -> fingerprint -> releases; `derived` has those of them that no build has shown."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        targets: dict[str, dict[str, list[str]]] | None = None,
        derived: dict[tuple[str, str], list[str]] | None = None,
    ) -> None:
        self.path = path
        self.targets: dict[str, dict[str, list[str]]] = {} if targets is None else targets
        self.derived: dict[tuple[str, str], list[str]] = {} if derived is None else derived

    @classmethod
    def read(cls, path: str | os.PathLike[str] = PATH) -> Lock:
        """Raises LockError when the file is missing or not of the known form."""
        try:
            with open(path, encoding="utf-8") as file:
                data = json.load(file)
            if data["schema"] not in READABLE:
                raise LockError(
                    f"{path} has schema {data['schema']}, this version reads {READABLE}; update the package"
                )
            targets = {
                target: {entry["fingerprint"]: list(entry["versions"]) for entry in entries}
                for target, entries in data["targets"].items()
            }
            derived = {
                (target, entry["fingerprint"]): list(entry[DERIVED])
                for target, entries in data["targets"].items()
                for entry in entries
                if DERIVED in entry
            }
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LockError(
                f"sought the reviewed fingerprints in {path}, found {type(error).__name__}: {error}. Reinstall "
                f"the package, or restore the file from version control."
            ) from error
        return cls(path, targets, derived)

    def accepted(self, target: str) -> dict[str, list[str]]:
        """Fingerprint -> releases; empty for a target that was never pinned."""
        return self.targets.get(target, {})

    def accept(self, target: str, fingerprint: str, version: str) -> bool:
        """Add a release that was seen to a fingerprint; says whether anything is new."""
        versions = self.targets.setdefault(target, {}).setdefault(fingerprint, [])
        derived = self.derived.get((target, fingerprint), [])
        if version in derived:
            derived.remove(version)
            return True
        if version in versions:
            return False
        versions.append(version)
        versions.sort(key=release)
        return True

    def write(self) -> None:
        """Write the file, sorted, so that a pin is a small diff."""
        data = {
            "schema": SCHEMA,
            "targets": {
                target: [
                    {
                        "fingerprint": fingerprint,
                        "versions": versions,
                        **(
                            {DERIVED: derived} if (derived := self.derived.get((target, fingerprint))) else {}
                        ),
                    }
                    for fingerprint, versions in sorted(entries.items(), key=lambda item: release(item[1][0]))
                ]
                for target, entries in sorted(self.targets.items())
            },
        }
        with open(self.path, "w", encoding="utf-8") as file:
            file.write(json.dumps(data, indent=1) + "\n")
