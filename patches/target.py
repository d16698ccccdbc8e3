"""What an override replaces: a function or method, named where it is defined."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

from patches.errors import TargetError


class Target(NamedTuple):
    """``package.module:Qualified.name``."""

    module: str
    qualname: str

    @classmethod
    def parse(cls, text: str) -> Target:
        """Raises TargetError for any other form."""
        module, _, qualname = text.partition(":")
        if not all(name.isidentifier() for name in (*module.split("."), *qualname.split("."))):
            raise TargetError(f"target {text!r} is not of the form 'package.module:Qualified.name'")
        return cls(module, qualname)

    def __str__(self) -> str:
        return f"{self.module}:{self.qualname}"

    def owner(self, module: ModuleType) -> Any:
        """The module or class that holds the name, or None where a class on the way is missing."""
        owner: Any = module
        for part in self.qualname.split(".")[:-1]:
            owner = getattr(owner, part, None)
        return owner

    def value(self, module: ModuleType) -> Any:
        """What the name is bound to in its owner itself (not in a base class), or None."""
        owner = self.owner(module)
        return None if owner is None else vars(owner).get(self.name)

    @property
    def name(self) -> str:
        """The last part of the qualified name."""
        return self.qualname.rpartition(".")[2]
