"""Arguments of a module's forward by name, however they were passed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any


@functools.lru_cache(maxsize=64)
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)


def call_arguments(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Mapping[str, Any]:
    """What a forward pre-hook was given, by the names of `module.forward` as it is now (frameworks replace it).

    Raises:
        TypeError: arguments that the forward does not take, as the call itself would.
    """
    forward = module.forward
    function = getattr(forward, "__func__", None)
    if function is None:
        return _signature(forward).bind(*args, **kwargs).arguments
    # By the function: a bound method in the cache would keep its model alive.
    return _signature(function).bind(module, *args, **kwargs).arguments
