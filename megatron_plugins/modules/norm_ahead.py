"""A norm that was computed ahead, together with the sum it is the norm of, and waits on that sum to be asked for.

The residual add and the norm behind it are calls apart in Megatron's layers, which stay as they are. So the add
computes both and leaves the norm on the tensor that it returns; the norm's module takes it if it is given that very
tensor, unchanged since, and would compute the same. In every other case (a hook made another tensor of it or wrote into
it, a checkpoint detached it, gradients are recorded now and were not then) the module computes: the same bits, once
more.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from megatron_plugins.modules.norm_functions import NormTerms

_ATTRIBUTE = "deterministic_norm_ahead"


class _Ahead(NamedTuple):
    normed: torch.Tensor
    terms: NormTerms
    versions: tuple[int, int]


def _versions(total: torch.Tensor, terms: NormTerms) -> tuple[int, int]:
    return total._version, terms.weight._version


def can_wait(total: torch.Tensor) -> bool:
    """Whether a change of `total` would be seen. Tensors of torch.inference_mode do not count their changes."""
    return not total.is_inference()


def leave(total: torch.Tensor, normed: torch.Tensor, terms: NormTerms) -> None:
    """Leave the norm of `total` on it, for `take`."""
    ahead = _Ahead(normed, terms, _versions(total, terms))
    setattr(total, _ATTRIBUTE, ahead)


def take(total: torch.Tensor, terms: NormTerms) -> torch.Tensor | None:
    """The norm of `total` by `terms` if it waits there and still holds, else None. It can be taken once."""
    ahead: Any = getattr(total, _ATTRIBUTE, None)
    if ahead is None:
        return None
    delattr(total, _ATTRIBUTE)
    recorded = torch.is_grad_enabled() and (total.requires_grad or terms.weight.requires_grad)
    same = (
        ahead.terms.weight is terms.weight
        and ahead.terms[1:] == terms[1:]
        and ahead.versions == _versions(total, terms)
        and ahead.normed.requires_grad == recorded
    )
    return ahead.normed if same else None
