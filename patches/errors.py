"""Errors of the patch layer. None derives from ImportError: upstream code swallows those and goes on without us.

Every message says what was sought, what was found and what to do about it.
"""

from __future__ import annotations


class OverrideError(RuntimeError):
    """Base of everything this project refuses."""


class TargetError(OverrideError):
    """A target is not written as ``package.module:Qualified.name``."""


class RegistryError(OverrideError):
    """Two overrides claim one id or one target, or a declaration lacks a field."""


class ModeError(OverrideError):
    """A mode that does not exist, or two different modes in one process."""


class LateActivationError(OverrideError):
    """A module to be overridden was imported before the layer was armed: others may hold its functions already."""


class DriftError(OverrideError):
    """Upstream's function is not one that was reviewed: it moved, is gone, or its source changed."""


class ApplyError(OverrideError):
    """Reading upstream's module or building the replacement failed; what failed is the cause."""


class LockError(OverrideError):
    """``overrides.lock.json`` cannot be read or says nothing about a target."""


class GateError(OverrideError):
    """The run is not what the ledger promises; nothing may be computed."""


class NotCoveredError(OverrideError):
    """The numbers contract does not cover what was asked for."""
