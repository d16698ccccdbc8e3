"""Applies overrides the moment their defining module has executed, before anybody can import a name from it.

A meta-path finder wraps the loader of every module that has a target. It stays in place, so a reload is overridden
again. A failure is latched: whoever swallows it and imports once more gets the same error, never an unpatched module.
"""

from __future__ import annotations

import functools
import importlib.machinery
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from patches import binding, fingerprint, versions
from patches.errors import ApplyError, DriftError, OverrideError
from patches.ledger import APPLIED, NOT_REQUIRED, REFUSED, Entry, Ledger
from patches.override import ALIAS, BINDING, Override

if TYPE_CHECKING:
    from importlib.abc import Loader, MetaPathFinder
else:
    # Importing them would be a tenth of the time that arming takes, and the import system asks for no base class.
    Loader = MetaPathFinder = object

MARK = "__deterministic_rocm__"
"""Attribute of a replacement: the id of its override."""

WAYS_ON = (
    "Ways on: (1) review the change, then accept it with `python -m patches pin {id}`; (2) install an upstream release "
    "listed above; (3) run without --deterministic-rocm."
)


def _noting_calls(entry: Entry, function: FunctionType) -> FunctionType:
    """`function`, which says in the ledger that it was called.

    The mark is stored, never read: torch.compile then has nothing to guard on and compiles once. Counting would read.
    """

    def noting(*args: Any, **kwargs: Any) -> Any:
        entry.called = True
        return function(*args, **kwargs)

    return noting  # type: ignore[return-value]


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
        self.ledger, self.lock = ledger, ledger.lock
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
        for override in self.by_module[module.__name__]:
            try:
                self._apply_one(override, module)
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

    def _apply_one(self, override: Override, module: ModuleType) -> None:
        file = Path(module.__file__ or "")
        version = versions.beside(file, module.__name__, override.distribution)
        holder = sys.modules.get(override.target.module)
        if holder is None:
            absence = f"no module {override.target.module} after {override.trigger} was imported"
            raise DriftError(self._drift(override, version, absence))
        original = override.target.value(holder)
        if original is None:
            if version is not None and override.versions and not versions.matches(version, override.versions):
                reason = f"{override.distribution} {version} has no such function (it exists in {override.versions})"
                self.ledger.move(override.id, NOT_REQUIRED, reason, version=version)
                return
            left_out = binding.left_out(override, file, version, self.lock.accepted(str(override.target)))
            if left_out is not None:
                self.ledger.move(override.id, NOT_REQUIRED, left_out, version=version)
                return
            absence = f"no {override.target.qualname} in {holder.__file__ or file}"
            if version is None and override.versions:
                # Whether this release ought to have it cannot be told, and pinning cannot help.
                absence += (
                    f" (it exists in {override.versions}; to say which release this is, install it: no .dist-info "
                    "or .egg-info lies beside the package)"
                )
            raise DriftError(self._drift(override, version, absence))
        if getattr(original, MARK, None) == override.id:
            return
        if override.mended is not None and (reason_mended := override.mended(module)) is not None:
            self.ledger.move(override.id, NOT_REQUIRED, reason_mended, version=version)
            return
        if override.kind == BINDING:
            found = self._reviewed_binding(override, holder, original, version)
        else:
            found = self._reviewed_source(override, file, version)
        replacement = override.build(original)
        entry = self.ledger.entries[override.id]
        static = isinstance(replacement, staticmethod)
        function = replacement.__func__ if static else replacement
        if isinstance(function, FunctionType):
            entry.called = bool(entry.called)
            function = _noting_calls(entry, function)
        # Also where the replacement is a wrapper of its own: `__wrapped__` leads to upstream's function.
        upstream = original.__func__ if isinstance(original, staticmethod) else original
        functools.update_wrapper(function, upstream, updated=())
        replacement = staticmethod(function) if static else function
        for marked in (function, replacement):
            setattr(marked, MARK, override.id)
        setattr(override.target.owner(holder), override.target.name, replacement)
        for name in override.reexports:
            other = sys.modules.get(name)
            if other is not None and vars(other).get(override.target.name) is original:
                setattr(other, override.target.name, replacement)
        self.ledger.move(
            override.id,
            APPLIED,
            fingerprint=found,
            version=version,
            original=original,
            replacement=replacement,
        )

    def _reviewed_source(self, override: Override, file: Path, version: str | None) -> str:
        alias = override.kind == ALIAS
        found = fingerprint.of_source(file.read_text(), override.target, override.also, alias)
        if found is None:
            verb = "assigned" if alias else "defined"
            absence = f"{override.target.qualname} is bound in {file}, but not {verb} there"
            raise DriftError(self._drift(override, version, absence))
        if found not in self.lock.accepted(str(override.target)):
            raise DriftError(self._drift(override, version, f"{found} in {file}"))
        return found

    def _reviewed_binding(
        self, override: Override, holder: ModuleType, original: Any, version: str | None
    ) -> str:
        found, refusal = binding.look(override, holder, original, version)
        if found is None or refusal is not None:
            raise DriftError(self._drift(override, version, refusal or "no signature"))
        if not versions.among(version, self.lock.accepted(str(override.target)).get(found, ())):
            raise DriftError(self._drift(override, version, found))
        return found

    def _drift(self, override: Override, version: str | None, found: str) -> str:
        accepted = self.lock.accepted(str(override.target))
        expected = "; ".join(f"{print_} ({', '.join(releases)})" for print_, releases in accepted.items())
        return (
            f"override {override.id}: upstream's {override.target} is not the code that was reviewed. "
            f"Sought {expected or 'a fingerprint, but none was ever pinned'}. Found {found}, "
            f"{override.distribution} {version or 'of unknown version'}. " + WAYS_ON.format(id=override.id)
        )
