"""All declared overrides: one name per thing, a duplicate raises, an unknown raises."""

from __future__ import annotations

from collections.abc import Iterator

from patches.errors import RegistryError
from patches.override import Override


class Registry:
    """Overrides by id, in order of declaration."""

    def __init__(self) -> None:
        self._by_id: dict[str, Override] = {}

    def add(self, override: Override) -> None:
        """Raises RegistryError when the id or the target is taken."""
        for known in self._by_id.values():
            if known.id == override.id or known.target == override.target:
                raise RegistryError(
                    f"override {override.id!r} of {override.target} is declared, but {known.id!r} of "
                    f"{known.target} exists already: an id and a target belong to one override. Rename it, or "
                    f"remove one of the two."
                )
        self._by_id[override.id] = override

    def get(self, id: str) -> Override:
        """Raises RegistryError for an unknown id, listing the known ones."""
        try:
            return self._by_id[id]
        except KeyError:
            raise RegistryError(f"no override {id!r}; known: {', '.join(sorted(self._by_id))}") from None

    def __iter__(self) -> Iterator[Override]:
        return iter(self._by_id.values())

    def __len__(self) -> int:
        return len(self._by_id)

    def of_mode(self, mode: str) -> list[Override]:
        """Overrides that are active in `mode`."""
        return [override for override in self if mode in override.modes]


REGISTRY = Registry()
