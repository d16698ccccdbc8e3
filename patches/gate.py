"""The last look before anything is computed: is what the ledger promises what this process will run?

Standard library only. Exchanging digests between ranks and looking at a model is the framework's side
(megatron_plugins/gate.py).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from patches import operator_schema
from patches.errors import DriftError, GateError
from patches.finder import MARK
from patches.ledger import APPLIED, ARMED, NOT_REQUIRED, REFUSED, VERIFIED, Entry, Ledger
from patches.lock import Lock


def settle(ledger: Ledger) -> None:
    """Bring every override to VERIFIED or NOT_REQUIRED.

    An override whose module was never imported is NOT_REQUIRED for now; it stays armed and applies if the module comes.

    Raises:
        GateError: a target is refused, was replaced by somebody else afterwards, was imported around the finder, or its
            original is still held by value somewhere. All findings in one message.
    """
    findings: list[str] = []
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
            findings += [
                f"{id}: {alias} still holds upstream's {target.name} by value" for alias in aliases(entry)
            ]
            ledger.move(id, VERIFIED)
            findings += _operators(entry)
    if findings:
        raise GateError(
            "the job may not start: sought every required override verified, found "
            + "; ".join(findings)
            + ". Mend these, "
            "or run without --deterministic-rocm."
        )


def _operators(entry: Entry) -> list[str]:
    """What is wrong with the torch operators that a replacement calls."""
    findings: list[str] = []
    if not entry.override.operators:
        return findings
    lock = Lock.read()
    for operator in entry.override.operators:
        reviewed = lock.accepted(operator_schema.lock_key(operator))
        texts = [text.removeprefix(operator_schema.PREFIX) for text in reviewed]
        try:
            operator_schema.require_prefix(operator, texts, who=f"override {entry.override.id}")
        except DriftError as error:
            findings.append(str(error))
    return findings


def aliases(entry: Entry) -> list[str]:
    """``module.name`` of every module-level name that is still bound to the original."""
    found = []
    for name, module in list(sys.modules.items()):
        namespace = getattr(module, "__dict__", None)
        if not isinstance(namespace, dict):
            continue
        found += [f"{name}.{key}" for key, value in list(namespace.items()) if value is entry.original]
    return found


def write(ledger: Ledger, path: Path, **facts: Any) -> None:
    """Write the ledger file: mode, digest, one entry an override, and whatever the framework adds."""
    path.write_text(json.dumps({**ledger.as_dict(), **facts}, indent=1) + "\n")


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
