"""Times of several implementations in one run: other order every round, cold cache, medians."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch


def median_ms(functions: dict[str, Callable[[], Any]], device: str, repeats: int) -> dict[str, float]:
    """Median milliseconds of each.

    What ran before sets a GPU's clocks, by up to 15%, so each round has another order. A GPU's cache is filled with
    zeros of something else in between.
    """
    for function in functions.values():
        for _ in range(3):
            function()
    times: dict[str, list[float]] = {name: [] for name in functions}
    order, shuffle = list(functions), random.Random(0).shuffle
    flush = torch.empty(256 << 20 if device == "cuda" else 1, device=device, dtype=torch.int8)
    for _ in range(repeats):
        shuffle(order)
        for name in order:
            times[name].append(_once(functions[name], flush))
    return {name: statistics.median(values) for name, values in times.items()}


def _once(function: Callable[[], Any], flush: torch.Tensor) -> float:
    flush.zero_()
    if not flush.is_cuda:
        start = time.perf_counter()
        function()
        return (time.perf_counter() - start) * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    function()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end))


def captured(function: Callable[[], Any]) -> Callable[[], None]:
    """The same as a CUDA graph: without the host's time."""
    for _ in range(3):
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay
