"""The last look before anything is computed: is what the ledger promises what this process will run?

Standard library only. Exchanging digests between ranks and looking at a model is the framework's side
(megatron_plugins/gate.py).
"""

from __future__ import annotations

import atexit
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

from patches import schema
from patches.applying import MARK
from patches.errors import DriftError, GateError
from patches.ledger import APPLIED, ARMED, NOT_REQUIRED, REFUSED, VERIFIED, Entry, Ledger
from patches.lock import Lock
from patches.override import ALIAS


def settle(ledger: Ledger) -> None:
    """Bring every override to VERIFIED or NOT_REQUIRED.

    An override whose module was never imported is NOT_REQUIRED for now; it stays armed and applies if the module comes.

    Raises:
        GateError: a target is refused, was replaced by somebody else afterwards, was imported around the finder, or its
            original is still held by value somewhere, or its file was executed under a second name. All findings in one
            message.
    """
    findings: list[str] = []
    kept = aliases(ledger)
    findings += second_copies(ledger)
    for id, entry in ledger.entries.items():
        target, trigger = entry.override.target, entry.override.trigger
        module = sys.modules.get(target.module)
        if entry.state == REFUSED:
            findings.append(f"{id} is refused: {entry.reason}")
        elif entry.state == ARMED and trigger not in sys.modules:
            ledger.move(id, NOT_REQUIRED, f"{trigger} is not imported in this process")
        elif entry.state == ARMED:
            findings.append(
                f"{id}: {trigger} is imported, but the finder never saw it; arm before importing it"
            )
        elif entry.state in (APPLIED, VERIFIED) and module is not None:
            current = target.value(module)
            if getattr(current, MARK, None) != id:
                now = f"{getattr(current, '__module__', '?')}.{getattr(current, '__qualname__', current)}"
                findings.append(
                    f"{id}: {target} is now {now}; it was replaced after this project did. Remove that patch"
                )
                continue
            if places := kept.get(id):
                verb = "holds" if len(places) == 1 else "hold"
                findings.append(f"{id}: {', '.join(places)} still {verb} upstream's {target.name} by value")
                continue
            if wrong := _operators(entry, ledger.lock):
                findings += wrong
                continue
            if entry.state == VERIFIED or entry.override.probe is None:
                ledger.move(id, VERIFIED, entry.reason)
                continue
            needed, evidence = entry.override.probe(entry.original)
            ledger.move(id, VERIFIED if needed else NOT_REQUIRED, evidence)
    if findings:
        raise GateError(
            "the job may not start: sought every required override verified, found "
            + "; ".join(findings)
            + ". Mend these, "
            "or run without --deterministic-rocm."
        )


def _operators(entry: Entry, lock: Lock) -> list[str]:
    """What is wrong with the torch operators that a replacement calls."""
    findings: list[str] = []
    for operator in entry.override.operators:
        reviewed = lock.accepted(schema.lock_key(operator))
        texts = [text.removeprefix(schema.PREFIX) for text in reviewed]
        try:
            schema.require_prefix(operator, texts, who=f"override {entry.override.id}")
        except DriftError as error:
            findings.append(str(error))
    return findings


def aliases(ledger: Ledger) -> dict[str, list[str]]:
    """Override id -> every name that is still bound to its original: ``module.name``, ``module.Class.attribute``.

    Every module and every class in it, once for all overrides. An original inside a container or a closure is not
    found. The function behind a replaced alias is another package's: it stays where it is, under its other names.
    """
    replaced = {
        name: e for name, e in ledger.entries.items() if e.original is not None and e.override.kind != ALIAS
    }
    originals = {id(e.original): name for name, e in replaced.items()}
    # A module may have been imported, taken out of sys.modules, and imported again after arming: what somebody took
    # from the first copy is another object, but says where it was defined.
    definitions = {
        (e.override.target.module, e.override.target.qualname): name for name, e in replaced.items()
    }
    namespaces = [
        (name, namespace)
        for name, module in list(sys.modules.items())
        if isinstance(namespace := getattr(module, "__dict__", None), dict)
    ]
    found: dict[str, list[str]] = {}
    classes: set[int] = set()
    while namespaces:
        where, namespace = namespaces.pop()
        for key, value in list(namespace.items()):
            # By type(): isinstance would ask lazy modules for their class and import what they stand for.
            kind = type(value)
            held = value.__func__ if kind in (staticmethod, classmethod) else value
            owner = originals.get(id(held))
            if owner is None and type(held) is FunctionType and MARK not in vars(held):
                owner = definitions.get((held.__module__, held.__qualname__))
            if owner is not None:
                found.setdefault(owner, []).append(f"{where}.{key}")
            elif issubclass(kind, type) and id(value) not in classes:
                classes.add(id(value))
                namespaces.append(
                    (f"{value.__module__}.{value.__qualname__}", type.__getattribute__(value, "__dict__"))
                )
    return {name: sorted(places) for name, places in found.items()}


def second_copies(ledger: Ledger) -> list[str]:
    """Modules that executed the file of a module with a target under another name, in words.

    A folder inside a package on sys.path (``core.tensor_parallel`` for ``megatron.core.tensor_parallel``), or a loader
    by path, makes a second module with upstream's functions, which no finder is asked for by the target's name.
    """
    names = {e.override.target.module for e in ledger.entries.values()}
    ends = {
        name.replace(".", os.sep) + end: name for name in names for end in (".py", f"{os.sep}__init__.py")
    }
    found: list[str] = []
    for name, module in list(sys.modules.items()):
        # By the dictionary: asking a lazy module for a name imports what it stands for.
        namespace = getattr(module, "__dict__", {})
        file = namespace.get("__file__") if isinstance(namespace, dict) else None
        if not isinstance(file, str) or name in names:
            continue
        for end, target in ends.items():
            if "." in target and file.endswith(os.sep + end) and namespace.get("__name__") != target:
                found.append(
                    f"{file} is imported as {name} too, where nothing of {target} is replaced; import it by that name"
                )
    return found


def write(ledger: Ledger, paths: Sequence[Path], **facts: Any) -> None:
    """Write the ledger files now, and once more at exit, when what was called is known.

    The content: mode, digest, one entry an override, `written` ("before the first forward" or "at exit"), `pid`, and
    what the framework adds.
    A process that is killed, or leaves by ``os._exit`` as children of multiprocessing do, leaves the first version. A
    file that another run has written since is left alone.
    """

    def text(written: str) -> str:
        return json.dumps({**ledger.as_dict(), "written": written, "pid": pid, **facts}, indent=1) + "\n"

    pid = os.getpid()
    first = text("before the first forward")
    places = [path.absolute() for path in paths]
    for path in places:
        path.write_text(first)
    atexit.register(_write_at_exit, ledger, places, first, text, pid)


def _write_at_exit(
    ledger: Ledger, places: list[Path], first: str, text: Callable[[str], str], pid: int
) -> None:
    if os.getpid() != pid:
        return  # a forked child that ends before its parent
    for path in places:
        try:
            if path.read_text() == first:
                path.write_text(text("at exit"))
        except OSError as error:
            print(
                f"deterministic-rocm: sought to complete {path}, found {error}", file=sys.stderr, flush=True
            )
    idle = [id for id, entry in ledger.entries.items() if entry.state == VERIFIED and entry.called is False]
    if idle:
        print(f"deterministic-rocm: installed, never called in this process: {', '.join(idle)}", flush=True)


def table(ledger: Ledger) -> str:
    """For the log: one line of summary, one line an override."""
    states = [entry.state for entry in ledger.entries.values()]
    lines = [
        f"deterministic-rocm: mode {ledger.mode}, {states.count(VERIFIED)} overrides verified, "
        f"{states.count(NOT_REQUIRED)} not required, digest {ledger.digest()}"
    ]
    idle: dict[str, list[str]] = {}
    for id, entry in ledger.entries.items():
        if entry.state == NOT_REQUIRED:
            idle.setdefault(entry.reason or "", []).append(id)
        else:
            lines.append(f"  {entry.state:12} {id:42} {entry.version or ''} {entry.reason or ''}".rstrip())
    lines += [f"  {NOT_REQUIRED:12} {reason}: {', '.join(ids)}" for reason, ids in idle.items()]
    return "\n".join(lines)
