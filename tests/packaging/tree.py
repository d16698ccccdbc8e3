"""What the packaging tests know about the repository: its root, its packages and its configuration."""

from __future__ import annotations

import configparser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOP_PACKAGES = ("patches", "te_overrides", "megatron_plugins")


def configuration() -> configparser.ConfigParser:
    """setup.cfg, parsed."""
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def listed(section: str, option: str) -> list[str]:
    """The lines of a list in setup.cfg."""
    return configuration()[section][option].split("\n")[1:]


def sources(*folders: str) -> list[Path]:
    """Every Python file under the named folders of the repository."""
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def shown(path: Path) -> str:
    """A path as it reads from the root of the repository."""
    return path.relative_to(ROOT).as_posix()
