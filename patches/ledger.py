"""The only truth about what is active: every override's state in this process.

::

    ARMED -> APPLIED -> VERIFIED          REFUSED is final
      `--------`----> NOT_REQUIRED(reason)

KNOWN_BIASED(figures) is where an operator is left alone in this mode although it is known to be biased. It stays so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from patches.errors import OverrideError
from patches.override import Override

if TYPE_CHECKING:  # reading it is work of the armed process
    from patches.lock import Lock

ARMED, APPLIED, VERIFIED, NOT_REQUIRED, REFUSED = "ARMED", "APPLIED", "VERIFIED", "NOT_REQUIRED", "REFUSED"
KNOWN_BIASED = "KNOWN_BIASED"

_ALLOWED = {
    ARMED: {ARMED, APPLIED, NOT_REQUIRED, REFUSED},
    # A reload applies again; a probe of upstream's function may find nothing to mend.
    APPLIED: {APPLIED, VERIFIED, NOT_REQUIRED, REFUSED},
    VERIFIED: {APPLIED, VERIFIED, REFUSED},
    # Not imported when the gate looked, imported later.
    NOT_REQUIRED: {NOT_REQUIRED, APPLIED, REFUSED},
    REFUSED: {REFUSED},
    KNOWN_BIASED: {KNOWN_BIASED},
}


class Entry:
    """One override's state. `original` and `replacement` are the objects themselves, for the gate.

    `called`: whether the replacement has run in this process; None where nothing is installed, or where it is no
    function and cannot tell.
    """

    def __init__(self, override: Override, state: str = ARMED, reason: str | None = None) -> None:
        self.override, self.state, self.reason = override, state, reason
        self.fingerprint: str | None = None
        self.version: str | None = None
        self.original: Any = None
        self.replacement: Any = None
        self.called: bool | None = None

    def as_dict(self) -> dict[str, Any]:
        """What status and the ledger file show."""
        return {
            "id": self.override.id,
            "target": str(self.override.target),
            "state": self.state,
            "reason": self.reason,
            "fingerprint": self.fingerprint,
            "version": self.version,
            "called": self.called,
            "why": self.override.why,
        }


class Ledger:
    """Entries of one armed process, and the reviewed fingerprints that it was armed with."""

    def __init__(self, mode: str, lock: Lock, entries: dict[str, Entry] | None = None) -> None:
        self.mode, self.lock = mode, lock
        self.entries: dict[str, Entry] = {} if entries is None else entries

    def move(self, id: str, state: str, reason: str | None = None, **facts: Any) -> Entry:
        """Change a state. Raises OverrideError for a step that the diagram does not have."""
        entry = self.entries[id]
        if state not in _ALLOWED[entry.state]:
            raise OverrideError(
                f"override {id} cannot go from {entry.state} to {state}; it was {entry.reason or 'left so'}"
            )
        entry.state, entry.reason = state, reason
        for name, value in facts.items():
            setattr(entry, name, value)
        return entry

    def digest(self) -> str:
        """Hash of mode, ids, states and fingerprints: equal on two ranks exactly when they run the same code.

        What was called does not enter: a pipeline stage calls other functions than its neighbour.
        """
        import hashlib  # a tenth of the time that arming may take, and no digest is asked for before the gate
        import json

        facts = [
            [e.override.id, e.state, e.fingerprint]
            for e in sorted(self.entries.values(), key=lambda e: e.override.id)
        ]
        return hashlib.sha256(json.dumps([self.mode, facts]).encode()).hexdigest()[:32]

    def as_dict(self) -> dict[str, Any]:
        """The ledger file's content."""
        return {
            "mode": self.mode,
            "digest": self.digest(),
            "overrides": [e.as_dict() for e in self.entries.values()],
        }
