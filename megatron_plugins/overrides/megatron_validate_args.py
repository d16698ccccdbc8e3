"""Contradictions between the promise and the other arguments, refused once Megatron has settled their values.

Seam: ``validate_args`` in its defining module; ``initialize`` imports it by name afterwards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from patches import override


@override(
    id="megatron.validate_args",
    target="megatron.training.arguments:validate_args",
    modes=("stable", "invariant"),
    why="an argument that breaks the promise must stop the job before the model is built",
    how="checks upstream's validated arguments against the refusals; changes none",
    retire_when="never: this is the project's own check",
    evidence="docs/limits.md",
    distribution="megatron-core",
    versions=">=0.14",
)
def build(original: Callable[..., Any]) -> Callable[..., Any]:
    from megatron_plugins.arguments import check_arguments

    @functools.wraps(original)
    def validate_args(args: Any, *rest: Any, **kwargs: Any) -> Any:
        validated = original(args, *rest, **kwargs)
        check_arguments(validated if validated is not None else args)
        return validated

    return validate_args
