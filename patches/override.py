"""One declaration: what is replaced, why, how, until when, and where the evidence is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from patches.errors import RegistryError
from patches.target import Target

MODES = ("stable", "invariant")

SOURCE, BINDING, ALIAS = "source", "binding", "alias"
KINDS = (SOURCE, BINDING, ALIAS)

Build = Callable[[Any], Any]


class Override(NamedTuple):
    """A declared override.

    Attributes:
        id: its name in status, ledger and documentation.
        target: what it replaces.
        modes: modes in which it is active and required.
        why, how, retire_when: the argument, in a sentence each.
        evidence: page under docs/ that holds the measurements.
        distribution: upstream's distribution name.
        versions: releases that have the target; outside, its absence is NOT_REQUIRED, inside it is drift.
        also: helpers of the same module whose source enters the fingerprint.
        mended: given the module, says why upstream needs no override here, or None.
        kind: "source" (a Python function, known by its source), "binding" (a function of a compiled module, known by
            its signature and release) or "alias" (a name that the module assigns another package's function to, known
            by those statements and by the functions of `also`, which call it; the other package keeps its function).
        after: the module whose execution makes the target present; by default the target's own. A compiled module is
            loaded around every finder, so its functions are replaced when the Python module that uses them is there.
        absent: for a binding that a build of a reviewed release may lack: why, in words. Its absence is NOT_REQUIRED as
            long as the module of `after` still names it, since a call can only end in an AttributeError.
        reexports: modules of upstream that hold the function by value before it is replaced (`from compiled import *`).
            Its name is replaced there as well. A holder that is not listed is refused by the gate.
        operators: torch operators that the replacement calls, known by their schemas (`patches.schema`).
        probe: given the original, runs it in the gate, where a GPU may be used: (whether the override is needed, the
            evidence in words). Not needed is NOT_REQUIRED; the replacement then passes its calls on, since others may
            hold it by value, and must do so by itself.
        biased: for an operator that is left alone in the modes where the override is not active though its results are
            biased: the figures. The ledger shows it there as KNOWN_BIASED.
        build: makes the replacement from the original, after the defining module has executed.
    """

    id: str
    target: Target
    modes: tuple[str, ...]
    why: str
    how: str
    retire_when: str
    evidence: str
    distribution: str
    versions: str
    also: tuple[str, ...]
    mended: Callable[[Any], str | None] | None
    build: Build
    kind: str = SOURCE
    after: str = ""
    operators: tuple[str, ...] = ()
    reexports: tuple[str, ...] = ()
    absent: str = ""
    probe: Callable[[Any], tuple[bool, str]] | None = None
    biased: str = ""

    @property
    def trigger(self) -> str:
        """The module after whose execution the override is applied."""
        return self.after or self.target.module

    def checked(self) -> Override:
        """Itself. Raises RegistryError for an empty field, an unknown kind or mode."""
        if self.kind not in KINDS:
            raise RegistryError(f"override {self.id}: kind {self.kind!r}; known kinds: {KINDS}")
        for name in ("id", "why", "how", "retire_when", "evidence", "distribution"):
            if not getattr(self, name):
                raise RegistryError(
                    f"override {self.id or self.target}: the field {name!r} is empty; say it in a sentence"
                )
        if not self.modes or set(self.modes) - set(MODES):
            raise RegistryError(f"override {self.id}: modes {self.modes}; known modes: {MODES}")
        return self


def override(
    *,
    id: str,
    target: str,
    modes: tuple[str, ...],
    why: str,
    how: str,
    retire_when: str,
    evidence: str,
    distribution: str,
    versions: str = "",
    also: tuple[str, ...] = (),
    mended: Callable[[Any], str | None] | None = None,
    kind: str = SOURCE,
    after: str = "",
    operators: tuple[str, ...] = (),
    reexports: tuple[str, ...] = (),
    absent: str = "",
    probe: Callable[[Any], tuple[bool, str]] | None = None,
    biased: str = "",
) -> Callable[[Build], Build]:
    """Declare an override; the decorated function is its `build`. See `Override` for the fields.

    Raises:
        RegistryError: an id or a target that another override has, an empty field, an unknown mode.
        TargetError: a target of another form.
    """
    from patches.registry import REGISTRY

    def declare(build: Build) -> Build:
        REGISTRY.add(
            Override(
                id, Target.parse(target), tuple(modes), why, how, retire_when, evidence, distribution, versions,
                tuple(also), mended, build, kind, after, tuple(operators), tuple(reexports), absent,
                probe, biased,
            ).checked()
        )  # fmt: skip
        return build

    return declare
