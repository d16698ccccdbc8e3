"""Imported by a process before anything else of upstream: arms the layer, then loads megatron-core on the CPU.

$MEGATRON_SOURCES names an unpacked release (unset: the installed one), $DETERMINISTIC_ROCM the mode.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [*filter(None, [os.environ.get("MEGATRON_SOURCES")]), str(ROOT / "scripts"), str(ROOT)]

import patches.auto  # noqa: E402, F401
from megatron_plugins.verify.model import on_cpu  # noqa: E402

on_cpu.install_for_training()

import megatron.core.distributed  # noqa: E402, F401
