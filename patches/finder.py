"""Applies overrides the moment their defining module has executed, before anybody can import a name from it.

A meta-path finder wraps the loader of every module that has a target. It stays in place, so a reload is overridden
again. A failure is latched: whoever swallows it and imports once more gets the same error, never an unpatched module.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from patches.errors import ApplyError, OverrideError
from patches.ledger import REFUSED, Ledger
from patches.override import Override

if TYPE_CHECKING:
    from importlib.abc import Loader, MetaPathFinder
else:
    # Importing them would be a tenth of the time that arming takes, and the import system asks for no base class.
    Loader = MetaPathFinder = object


class OverrideLoader(Loader):
    """Executes a module as its own loader does, then applies the overrides."""

    def __init__(self, inner: Any, finder: OverrideFinder) -> None:
        self._inner, self._finder = inner, finder

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        # Tools that look a module's source up must find the loader that has it.
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        module.__loader__ = self._inner
        self._inner.exec_module(module)
        self._finder.apply(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class OverrideFinder(MetaPathFinder):
    """Finds nothing by itself: asks the others, and wraps what they found for modules that have targets."""

    def __init__(self, overrides: Sequence[Override], ledger: Ledger) -> None:
        self.ledger = ledger
        self.by_module: dict[str, list[Override]] = {}
        for override in overrides:
            self.by_module.setdefault(override.trigger, []).append(override)
        self._failed: dict[str, OverrideError] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.by_module:
            return None
        if fullname in self._failed:
            raise self._failed[fullname]
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = OverrideLoader(spec.loader, self)
                return spec
        return None

    def apply(self, module: ModuleType) -> None:
        """Apply every override of a module that has just executed; the first failure is latched and raised."""
        # What reads and compares source is needed now; every process that only arms would pay for it.
        from patches.applying import apply

        for override in self.by_module[module.__name__]:
            try:
                apply(override, module, self.ledger)
            except OverrideError as error:
                self._refuse(module, override, error)
                raise
            except Exception as error:
                # Above all an ImportError (no triton here): upstream would take its own module for missing and go on.
                refusal = ApplyError(
                    f"override {override.id} of {override.target} cannot be applied: {type(error).__name__}: {error}. "
                    f"Install what is missing, or run without --deterministic-rocm."
                )
                self._refuse(module, override, refusal)
                raise refusal from error

    def _refuse(self, module: ModuleType, override: Override, error: OverrideError) -> None:
        self._failed[module.__name__] = error
        self.ledger.move(override.id, REFUSED, str(error))
