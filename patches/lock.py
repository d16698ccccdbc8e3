"""``overrides.lock.json``: for every target the fingerprints that were reviewed, and the releases they came from."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from patches.errors import LockError
from patches.versions import release

PATH = Path(__file__).with_name("overrides.lock.json")
SCHEMA = 1


@dataclass
class Lock:
    """Accepted fingerprints: target -> fingerprint -> releases."""

    path: Path
    targets: dict[str, dict[str, list[str]]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path = PATH) -> Lock:
        """Raises LockError when the file is missing or not of the known form."""
        try:
            data = json.loads(path.read_text())
            if data["schema"] != SCHEMA:
                raise LockError(
                    f"{path} has schema {data['schema']}, this version reads {SCHEMA}; update the package"
                )
            targets = {
                target: {entry["fingerprint"]: list(entry["versions"]) for entry in entries}
                for target, entries in data["targets"].items()
            }
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LockError(
                f"sought the reviewed fingerprints in {path}, found {type(error).__name__}: {error}. Reinstall "
                f"the package, or restore the file from version control."
            ) from error
        return cls(path, targets)

    def accepted(self, target: str) -> dict[str, list[str]]:
        """Fingerprint -> releases; empty for a target that was never pinned."""
        return self.targets.get(target, {})

    def accept(self, target: str, fingerprint: str, version: str) -> bool:
        """Add a release to a fingerprint; says whether anything is new."""
        versions = self.targets.setdefault(target, {}).setdefault(fingerprint, [])
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
                    {"fingerprint": fingerprint, "versions": versions}
                    for fingerprint, versions in sorted(entries.items(), key=lambda item: release(item[1][0]))
                ]
                for target, entries in sorted(self.targets.items())
            },
        }
        self.path.write_text(json.dumps(data, indent=1) + "\n")
