"""What the ``.pth`` line runs at interpreter start: arm, or end the interpreter with one sentence.

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


def mode_from_command_line(arguments: list[str]) -> str | None:
    """The mode of ``--deterministic-rocm[=mode]`` on a command line; bare means invariant; None without the flag."""
    for argument in arguments:
        if argument == FLAG:
            return "invariant"
        if argument.startswith(FLAG + "="):
            return argument.partition("=")[2]
    return None


def _load_package() -> None:
    """Import ``patches`` from ROOT whatever sys.path says, and refuse another one that later imports would find."""
    for entry in [os.getcwd() if p == "" else p for p in sys.path]:
        other = os.path.join(entry, "patches", "__init__.py")
        if os.path.isfile(other) and os.path.realpath(
            os.path.dirname(os.path.dirname(other))
        ) != os.path.realpath(ROOT):
            raise RuntimeError(
                f"another package named patches lies in {entry} and would be imported instead of {ROOT}"
            )
        if os.path.realpath(entry) == os.path.realpath(ROOT):
            break
    else:
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
    if asked is None and not os.environ.get("DETERMINISTIC_ROCM"):
        return
    # The layer's own commands must work when something is wrong.
    if "-m" in sys.orig_argv and sys.orig_argv[sys.orig_argv.index("-m") + 1 :][:1] == ["patches"]:
        return
    _load_package()
    from patches.arming import arm, mode_from_environment

    exported = mode_from_environment()
    if asked is not None and exported is not None and asked != exported:
        raise RuntimeError(
            f"{FLAG}={asked} on the command line, DETERMINISTIC_ROCM={exported} in the environment"
        )
    arm(asked or exported or "invariant")


if __name__ != "patches.startup":
    main()
