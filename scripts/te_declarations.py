"""How TransformerEngine's releases declare the compiled functions that are replaced, read from their C++ sources.

    python scripts/te_declarations.py FOLDER > tests/drift/compiled_declarations.json

FOLDER holds unpacked source distributions of `transformer_engine_torch`, at any depth (`pip download --no-deps
--no-binary :all: transformer_engine_torch==VERSION`). Printed, one entry for every distinct form: the declaration in
`extensions.h`, the statement in `pybind.cpp` that binds it, and the releases that have both.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from patches.versions import release  # noqa: E402

FUNCTIONS = ("thd_second_half_lse_correction", "thd_out_correction")


def _one(pattern: str, file: Path) -> str:
    found = re.findall(pattern, file.read_text(), re.DOTALL)
    if len(found) != 1:
        raise SystemExit(
            f"sought one match of {pattern!r} in {file}, found {len(found)}; read the file by hand"
        )
    return " ".join(found[0].split())


def forms(folder: Path) -> list[dict[str, object]]:
    """One entry a distinct pair of declaration and binding, releases ascending."""
    versions: dict[tuple[str, str, str], list[str]] = {}
    for info in folder.rglob("PKG-INFO"):
        sources = info.parent / "csrc"
        if not sources.is_dir():
            continue
        version = re.findall(r"^Version: *(\S+)", info.read_text(), re.MULTILINE)[0]
        (header,), (bindings,) = sources.rglob("extensions.h"), sources.rglob("pybind.cpp")
        for name in FUNCTIONS:
            declaration = _one(rf"\bvoid\s+{name}\([^)]*\);", header)
            binding = _one(rf'm\.def\(\s*"{name}".*?\);', bindings)
            versions.setdefault((name, declaration, binding), []).append(version)
    return [
        {"name": name, "declaration": declaration, "binding": binding, "versions": sorted(which, key=release)}
        for (name, declaration, binding), which in sorted(
            versions.items(), key=lambda item: (item[0][0], release(min(item[1], key=release)))
        )
    ]


def main() -> None:
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        raise SystemExit(__doc__)
    found = forms(Path(sys.argv[1]))
    if not found:
        raise SystemExit(f"sought PKG-INFO beside csrc under {sys.argv[1]}, found none")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
