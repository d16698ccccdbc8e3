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


def contents() -> dict[Path, str]:
    """The files of `enable`: ``.pth``, and for Pythons that have PEP 829 ``.start`` with the module that it names.

    That module lies beside it and is no part of this package: Python prints and ignores it when the name in a
    ``.start`` file cannot be resolved, which is what another ``patches`` on the path would lead to.
    """
    statement, module = _statement(), f"{NAME}_start"
    return {
        folder() / f"{NAME}.pth": f"import os, sys; {statement}\n",
        folder() / f"{module}.py": f"import os, sys\n\n\ndef main():\n    {statement}\n",
        folder() / f"{NAME}.start": f"{module}:main\n",
    }


def _statement() -> str:
    """Off: two look-ups and no import beyond os and sys."""
    startup = str(_ROOT / "patches" / "startup.py")
    asked = "any(words in ' '.join(sys.orig_argv) for words in ('--deterministic-rocm', 'patches run'))"
    return f"(os.environ.get('DETERMINISTIC_ROCM') or {asked}) and exec({_PROGRAM!r}, {{'__file__': {startup!r}}})"


_PROGRAM = """
import os, sys
done = False
try:
    exec(compile(open(__file__).read(), __file__, "exec"), {"__file__": __file__})
    done = True
finally:
    if not done:
        sys.stderr.write(
            f"deterministic-rocm: the job may not start: sought {__file__}, which `python -m patches enable` named; "
            f"found {sys.exc_info()[1]!r}. With DETERMINISTIC_ROCM unset, `enable` the package in use, or `disable`.\\n"
        )
        sys.stderr.flush()
        os._exit(2)
"""


def enable() -> list[Path]:
    """Write the files; returns them. Raises OSError where the folder cannot be written."""
    for path, text in contents().items():
        path.write_text(text)
    return list(contents())


def disable() -> list[Path]:
    """Remove the files; returns those that were there."""
    there = [path for path in contents() if path.exists()]
    for path in there:
        path.unlink()
    return there


def enabled() -> str:
    """ "yes", "no", or "stale" where a file is missing or was written by another copy of this package."""
    found = [path.read_text() if path.is_file() else None for path in contents()]
    if not any(found):
        return "no"
    return "yes" if found == list(contents().values()) else "stale"
