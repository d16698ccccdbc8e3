"""Imported by a process before anything else of upstream: arms the layer, then loads TransformerEngine on the CPU.

$TE_SOURCES names the unpacked release, $DETERMINISTIC_ROCM the mode (unset: upstream as it is).
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType

SOURCES = Path(os.environ["TE_SOURCES"])
sys.path[:0] = [str(SOURCES), str(Path(__file__).resolve().parents[2] / "scripts")]

import patches.auto  # noqa: E402, F401
from megatron_plugins.verify.model import te_on_cpu  # noqa: E402

context_parallel: ModuleType = te_on_cpu.load(SOURCES)
backends: ModuleType = importlib.import_module(
    "transformer_engine.pytorch.attention.dot_product_attention.backends"
)
