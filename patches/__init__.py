"""The patch layer: replaces reviewed upstream functions at import time, or stops the job in words.

Standard library only; arming imports neither torch nor any upstream package. Off means nothing is touched::

    DETERMINISTIC_ROCM=invariant python …      with `import patches.auto` before megatron or transformer_engine
    python -m patches status                   what is declared, pinned and, in an armed process, active
"""

from __future__ import annotations

from patches.arming import arm, armed_mode, current_ledger
from patches.override import override

__all__ = ["arm", "armed_mode", "current_ledger", "override"]
