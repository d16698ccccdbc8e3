"""``enable`` and ``disable``: a ``.pth`` file that lets the flag work on any command line of this interpreter.

Python prints and ignores whatever goes wrong in a ``.pth`` line. So the line is one condition that costs nothing when
the layer is off, and everything else happens in `patches.startup`, loaded by absolute path, which ends the interpreter
with one sentence when anything is wrong. Written on request only, never at install.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

NAME = "deterministic_rocm"
_ROOT = Path(__file__).resolve().parent.parent


def folder() -> Path:
    """Where this interpreter reads ``.pth`` files."""
    return Path(sysconfig.get_paths()["purelib"])


def files() -> list[Path]:
    """The two files of `enable`: ``.pth``, and ``.start`` for Pythons that have PEP 829."""
    return [folder() / f"{NAME}.pth", folder() / f"{NAME}.start"]


def pth_line() -> str:
    """One import line, as site.py wants it. Off: two look-ups and no import beyond os and sys."""
    startup = str(_ROOT / "patches" / "startup.py")
    asked = "any(a.startswith('--deterministic-rocm') or a.endswith('patches') for a in sys.orig_argv)"
    return (
        f"import os, sys; (os.environ.get('DETERMINISTIC_ROCM') or {asked}) and "
        f"exec(compile(open({startup!r}).read(), {startup!r}, 'exec'), {{'__file__': {startup!r}}})\n"
    )


def enable() -> list[Path]:
    """Write the files; returns them. Raises OSError where the folder cannot be written."""
    pth, start = files()
    pth.write_text(pth_line())
    start.write_text("patches.startup:main\n")
    return [pth, start]


def disable() -> list[Path]:
    """Remove the files; returns those that were there."""
    there = [path for path in files() if path.exists()]
    for path in there:
        path.unlink()
    return there


def enabled() -> str:
    """ "yes", "no", or "stale" where the ``.pth`` was written by another copy of this package."""
    pth, _ = files()
    if not pth.exists():
        return "no"
    return "yes" if pth.read_text() == pth_line() else "stale"
