"""Switching the layer on, once a process."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from patches.errors import LateActivationError, ModeError
from patches.ledger import KNOWN_BIASED, Entry, Ledger
from patches.override import MODES

if TYPE_CHECKING:
    from pathlib import Path

VARIABLE = "DETERMINISTIC_ROCM"
"""Environment variable that arms children too, since they do not inherit a command line."""

_ledger: Ledger | None = None


def armed_mode() -> str | None:
    """``"stable"``, ``"invariant"``, or None when the layer is off."""
    return None if _ledger is None else _ledger.mode


def current_ledger() -> Ledger | None:
    """The ledger of this process, or None when the layer is off."""
    return _ledger


def mode_from_environment(environment: Mapping[str, str] | None = None) -> str | None:
    """The mode that ``DETERMINISTIC_ROCM`` asks for; unset or empty is off.

    Raises:
        ModeError: any other value.
    """
    value = (os.environ if environment is None else environment).get(VARIABLE, "")
    if value in ("", *MODES):
        return value or None
    raise ModeError(f"{VARIABLE}={value!r}: the modes are {' and '.join(MODES)}; unset it to run without.")


def _how_far(name: str) -> str:
    # The import system's own mark; absent from a module that nobody imported by it.
    executing = getattr(getattr(sys.modules[name], "__spec__", None), "_initializing", False)
    return f"{name} is being imported" if executing else f"{name} had been imported"


def arm(mode: str, *, declarations: Sequence[str] | None = None, lock_path: Path | None = None) -> Ledger:
    """Arm the layer in this process and, through the environment, in its children. Arming again changes nothing.

    Args:
        mode: "stable" or "invariant".
        declarations: modules that declare overrides, by name; default: the catalogue.
        lock_path: reviewed fingerprints; default: the file beside this package.

    Raises:
        ModeError: an unknown mode, or another mode than the one that is armed.
        LateActivationError: a module with a target has been imported already.
        LockError: the reviewed fingerprints cannot be read.
    """
    global _ledger
    if mode not in MODES:
        raise ModeError(f"mode {mode!r}: the modes are {' and '.join(MODES)}")
    if _ledger is not None:
        if _ledger.mode != mode:
            raise ModeError(
                f"the layer is armed as {_ledger.mode!r} and cannot become {mode!r} in the same process"
            )
        return _ledger
    from patches import catalogue
    from patches.finder import OverrideFinder
    from patches.lock import Lock
    from patches.registry import REGISTRY

    lock = Lock.read() if lock_path is None else Lock.read(lock_path)
    catalogue.declare_all(declarations)
    overrides = REGISTRY.of_mode(mode)
    late = sorted({o.trigger for o in overrides if o.trigger in sys.modules})
    if late:
        raise LateActivationError(
            f"the layer was to be armed as {mode!r}, but {', '.join(map(_how_far, late))} already, so other "
            f"modules may hold upstream's functions by value. Arm earlier: export {VARIABLE}={mode} and put "
            f"`import patches.auto` before every import of megatron or transformer_engine, or start with `python "
            f"-m patches run`."
        )
    entries = {override.id: Entry(override) for override in overrides}
    entries |= {o.id: Entry(o, KNOWN_BIASED, o.biased) for o in REGISTRY if o.biased and mode not in o.modes}
    ledger = Ledger(mode, lock, entries)
    sys.meta_path.insert(0, OverrideFinder(overrides, ledger))
    os.environ[VARIABLE] = mode
    _ledger = ledger
    return ledger
