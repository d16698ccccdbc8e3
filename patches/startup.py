"""What the ``.pth`` and ``.start`` files run at interpreter start: arm, or end the interpreter with one sentence.

Executed from its path, not imported by name: another ``patches`` may come first on sys.path, and that is exactly what
must be found out here.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
FLAG = "--deterministic-rocm"
MODES = ("stable", "invariant")
"""Those of `patches.override`, which may not be imported yet."""


def mode_from_command_line(arguments: list[str]) -> str | None:
    """The mode of ``--deterministic-rocm[=mode]`` on a command line; bare means invariant; None without the flag.

    Megatron's parser also takes the mode as the next word; any other word there is none of ours.
    """
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if argument == FLAG:
            return following if following in MODES else "invariant"
        if argument.startswith(FLAG + "="):
            return argument.partition("=")[2]
    return None


def module_of_command_line() -> str | None:
    """The module of ``python -m module``, None for a script or ``-c``.

    Not searched for in `sys.orig_argv`: a script may have an argument ``-m`` of its own. The interpreter has put ``-m``
    in place of the module's name and left what follows.
    """
    if sys.argv[:1] != ["-m"]:
        return None
    word = sys.orig_argv[-len(sys.argv)]
    return word.partition("m")[2] if word.startswith("-") else word


def _refuse_foreign(entries: list[str]) -> bool:
    """Walk `entries` as an import of ``patches`` does; True when it ends at ROOT, False when nothing is found.

    Raises:
        RuntimeError: another package or module of that name comes first.
    """
    for entry in entries:
        if os.path.realpath(entry) == os.path.realpath(ROOT):
            return True
        # A folder without __init__.py loses against any package further on.
        spec = importlib.machinery.PathFinder.find_spec("patches", [entry])
        if spec is None or spec.origin is None:
            continue
        if os.path.realpath(spec.origin) == os.path.realpath(os.path.join(ROOT, "patches", "__init__.py")):
            return True
        raise RuntimeError(
            f"another package named patches lies in {entry} and would be imported instead of {ROOT}. Rename it, take "
            "its folder off the path, or start from another folder"
        )
    return False


def _load_package() -> None:
    """Import ``patches`` from ROOT whatever sys.path says, and refuse another one that later imports would find."""
    if not _refuse_foreign([p or os.getcwd() for p in sys.path]):
        sys.path.append(ROOT)
    if "patches" not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            "patches",
            os.path.join(ROOT, "patches", "__init__.py"),
            submodule_search_locations=[os.path.join(ROOT, "patches")],
        )
        if spec is None or spec.loader is None:
            raise RuntimeError(f"no package patches in {ROOT}")
        module = importlib.util.module_from_spec(spec)
        sys.modules["patches"] = module
        spec.loader.exec_module(module)


def main() -> None:
    """Arm by environment or flag. Any failure ends the interpreter with one sentence and status 2."""
    done = False
    try:
        _arm_if_asked()
        done = True
    finally:
        if not done:
            # An exception that leaves here is printed and ignored, a SystemExit becomes a fatal error of site.py with
            # two tracebacks around the sentence that matters.
            error = sys.exc_info()[1]
            sys.stderr.write(f"deterministic-rocm: the job may not start: {type(error).__name__}: {error}\n")
            sys.stderr.flush()
            os._exit(2)


def _arm_if_asked() -> None:
    asked = mode_from_command_line(sys.orig_argv)
    on = asked is not None or bool(os.environ.get("DETERMINISTIC_ROCM"))
    if module_of_command_line() == "patches":
        # The layer's own commands must work when something is wrong: they arm by themselves or not at all. But `-m`
        # looks into the working directory first, and a foreign package there would run in our name.
        if on or sys.argv[1:2] == ["run"]:
            safe = getattr(sys.flags, "safe_path", sys.flags.isolated)
            _refuse_foreign([*([] if safe else [os.getcwd()]), *(p or os.getcwd() for p in sys.path)])
        return
    if not on:
        return
    _load_package()
    from patches.arming import arm, mode_from_environment

    exported = mode_from_environment()
    if asked is not None and exported is not None and asked != exported:
        raise RuntimeError(
            f"{FLAG}={asked} on the command line, DETERMINISTIC_ROCM={exported} in the environment"
        )
    arm(asked or exported or "invariant")


main()
