"""``import patches.auto`` arms the layer when ``DETERMINISTIC_ROCM`` says so, and does nothing otherwise."""

from __future__ import annotations

from patches.arming import arm, mode_from_environment

_mode = mode_from_environment()
if _mode is not None:
    arm(_mode)
