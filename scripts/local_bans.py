"""Finds what this project bans and no linter knows: `python scripts/local_bans.py [FILE …]`.

Each ban keeps one promise. An autotuned kernel or a float atomic makes bits depend on timing. A torch import
under patches/ would initialize a GPU before a fork and would come too late to hook what torch imports. A broad
`except` turns a refusal into a silent fallback, which is the fault this project exists to end.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHECKED = ("patches", "te_overrides", "megatron_plugins", "scripts", "tests")
BROAD = {"Exception", "BaseException"}
# Flags between ranks are integers that are set and taken; tests look for float atomics in the compiled code.
INTEGER_FLAGS = {Path("te_overrides/kernels/collectives/peer_kernel.py")}


@dataclass(frozen=True)
class Finding:
    """One use of something banned, with the rule it breaks and the way out."""

    path: Path
    line: int
    rule: str
    way_out: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}; {self.way_out}"


def dotted(node: ast.expr) -> str:
    """The dotted name of an expression, "" for anything that is not a name."""
    if isinstance(node, ast.Call):
        return dotted(node.func)
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def imported(node: ast.AST) -> list[str]:
    """Absolute module names that a statement imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0:
        return [node.module or ""]
    return []


def reraises(handler: ast.ExceptHandler) -> bool:
    """Whether a handler's last statement is a raise: it adds to the error and swallows nothing."""
    return isinstance(handler.body[-1], ast.Raise)


def findings(path: Path, source: str) -> Iterator[Finding]:
    """Yield every banned use in one Python file; `path` is relative to the root of the repository."""
    for node in ast.walk(ast.parse(source, filename=str(path))):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.FunctionDef):
            for decorator in node.decorator_list:
                if dotted(decorator).split(".")[-1] == "autotune":
                    yield Finding(
                        path,
                        decorator.lineno,
                        "@triton.autotune chooses a launch by timing",
                        "write the launch into the operation's launch table",
                    )
        elif isinstance(node, ast.Attribute) and node.attr.startswith("atomic_"):
            if dotted(node.value) in {"tl", "triton.language"} and path not in INTEGER_FLAGS:
                yield Finding(
                    path,
                    line,
                    f"tl.{node.attr} adds in the order of arrival",
                    "give each element one owner and add by the balanced tree",
                )
        elif isinstance(node, ast.Import | ast.ImportFrom) and path.parts[0] == "patches":
            if any(name.split(".")[0] == "torch" for name in imported(node)):
                yield Finding(
                    path,
                    line,
                    "torch is imported under patches/",
                    "look it up in sys.modules, or move the code to te_overrides",
                )
        elif isinstance(node, ast.ExceptHandler):
            named = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            broad = any(kind is None or dotted(kind).split(".")[-1] in BROAD for kind in named)
            if broad and not reraises(node):
                yield Finding(
                    path,
                    line,
                    "broad except",
                    "name the errors that are expected, or end the handler with raise",
                )


def main(arguments: list[str]) -> int:
    """Check the named files, or all; returns the exit status."""
    files = [Path(name).resolve() for name in arguments] or [
        file for folder in CHECKED for file in sorted((ROOT / folder).rglob("*.py"))
    ]
    found = [
        finding
        for file in files
        if file.suffix == ".py" and file.is_relative_to(ROOT)
        for finding in findings(file.relative_to(ROOT), file.read_text(encoding="utf-8"))
    ]
    for finding in found:
        print(finding)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
