"""The check that every deterministic module makes when it is built."""

from __future__ import annotations

import os
from typing import Any

import patches
from megatron_plugins.refusals import refusals
from patches.errors import NotCoveredError


def require_supported(config: Any, *, is_expert: bool = False) -> None:
    """Raise unless the layer is armed and the contract covers `config`.

    In mode stable a part of a model may be deterministic and the rest upstream's; in mode invariant the gate asks for
    the whole.

    Raises:
        NotCoveredError: with every broken rule in one message.
    """
    if patches.armed_mode() is None:
        raise NotCoveredError(
            "a deterministic module is being built, but the patch layer is not armed: no gate would tell what of the "
            "model is deterministic. Start the job with --deterministic-rocm, or set DETERMINISTIC_ROCM=invariant "
            f"(found {os.environ.get('DETERMINISTIC_ROCM')!r}) and `import patches.auto` before megatron.core."
        )
    broken = refusals(config)
    if is_expert:
        broken.append("is_expert=True: expert layers are not part of the contract yet; use a dense model.")
    if broken:
        raise NotCoveredError("the numbers contract does not cover this model. " + " ".join(broken))
