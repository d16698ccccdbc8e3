"""What moved for our overrides between releases of an upstream.

    python scripts/scan_upstream.py FOLDER …         each an unpacked wheel or a source tree, oldest first
    python scripts/scan_upstream.py --json FOLDER …

For every override whose module one of the folders has: the fingerprint in each folder, whether it was reviewed, and
where it changes. Imports nothing from the folders. Exit status 1 when the last folder has a target that was not
reviewed, so that it can watch for new releases.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from patches import report
from patches.lock import Lock


def scan(folders: list[Path]) -> list[dict[str, Any]]:
    """One row an override: id, target, and per folder verdict, version and fingerprint."""
    lock, rows = Lock.read(), []
    for override in report.overrides():
        findings = [report.examine(override, lock, folder) for folder in folders]
        if all(finding.file is None for finding in findings):
            continue
        rows.append(
            {
                "id": override.id,
                "target": str(override.target),
                "folders": [
                    {
                        "folder": str(folder),
                        "version": f.version,
                        "verdict": f.verdict,
                        "fingerprint": f.found,
                    }
                    for folder, f in zip(folders, findings, strict=True)
                ],
            }
        )
    return rows


def _cell(now: dict[str, Any], before: dict[str, Any] | None) -> str:
    if now["verdict"] in ("not installed", "outside"):
        return f"[dim]{now['verdict']}[/dim]"
    short = (now["fingerprint"] or "gone").removeprefix("source:")[:8]
    changed = before is not None and before["fingerprint"] not in (None, now["fingerprint"])
    color = {"accepted": "green"}.get(now["verdict"], "bold red")
    return f"[{color}]{'* ' if changed else ''}{short} {now['verdict']}[/{color}]"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    for folder in args.folders:
        if not folder.is_dir():
            parser.error(f"{folder} is no folder; unpack the wheel first")
    rows = scan(args.folders)
    if args.json:
        print(json.dumps(rows, indent=1))
    else:
        table = Table(
            "override", *[folder.name for folder in args.folders], title="* changed against the folder before"
        )
        for row in rows:
            cells = row["folders"]
            table.add_row(row["id"], *[_cell(c, cells[i - 1] if i else None) for i, c in enumerate(cells)])
        Console().print(table)
    raise SystemExit(any(row["folders"][-1]["verdict"] in ("drifted", "absent") for row in rows))


if __name__ == "__main__":
    main()
