"""What happens to a language model when upstream's constructor has finished."""

from __future__ import annotations

from typing import Any

import patches
from megatron_plugins.batches import checker_of
from megatron_plugins.gate import before_first_forward
from megatron_plugins.modules.adds_before_norms import join_adds_with_norms
from megatron_plugins.modules.core_attention import look_once_a_model
from megatron_plugins.modules.outer_parts import take_over_outer_parts
from megatron_plugins.packed_order import tell_packed_order
from megatron_plugins.positions import check_positions


def finish(model: Any, *, deterministic: bool) -> None:
    """Take a GPTModel or HybridModel over, and hang the gate on it.

    Args:
        deterministic: whether its layers are ours; in mode invariant, what lies around them becomes ours then.

    Raises:
        NotCoveredError: what `take_over_outer_parts` refuses.
    """
    if patches.armed_mode() == "invariant" and deterministic:
        take_over_outer_parts(model)
        join_adds_with_norms(model.decoder)
        look_once_a_model(model.decoder)
        model.register_forward_pre_hook(checker_of(model), with_kwargs=True)
        tell_packed_order(model)
        # Behind it: boundaries that do not fit the rows are named first.
        model.register_forward_pre_hook(check_positions, with_kwargs=True)
    # A model that is not ours gets the gate as well: in mode invariant it is refused there, by name.
    model.register_forward_pre_hook(before_first_forward)
