"""Where a training step's time goes: GPU time of each part of a model, forward and backward, by events in its stream.

A part is a module or a method. Its inputs and outputs pass through an identity whose forward and backward record an
event, so the backward of a part is timed as well, without a word about what it computes. Events lie in the stream: time
in which the GPU waits for the host counts for the part that makes it wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class _Mark(torch.autograd.Function):
    """The identity; calls `forward_hook` on the way there and `backward_hook` on the way back."""

    @staticmethod
    def forward(
        ctx: Any, forward_hook: Callable[[], None], backward_hook: Callable[[], None], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        forward_hook()
        ctx.backward_hook = backward_hook
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        ctx.backward_hook()
        return (None, None, *grads)


class Parts:
    """Events by part and direction.

    with parts measured in between:  ``milliseconds()`` gives {part: (forward, backward)} of everything since `clear`.
    """

    def __init__(self) -> None:
        self.events: dict[tuple[str, str], list[list[torch.cuda.Event]]] = {}

    def clear(self) -> None:
        """Forget what was recorded."""
        self.events = {}

    def _record(self, part: str, direction: str, is_start: bool) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        pairs = self.events.setdefault((part, direction), [])
        if is_start:
            pairs.append([event])
        elif pairs and len(pairs[-1]) == 1:
            pairs[-1].append(event)

    def watch(self, owner: Any, method: str, part: str) -> None:
        """Time ``owner.method`` from now on as a call of `part`."""
        plain = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            def mark(given: Any, start: bool) -> Any:
                tensors = [x for x in given if isinstance(x, torch.Tensor) and x.requires_grad]

                def there() -> None:
                    self._record(part, "forward", start)

                def back() -> None:
                    self._record(part, "backward", not start)

                if not tensors:
                    there()
                    return given
                marked = iter(_Mark.apply(there, back, *tensors))
                return [next(marked) if isinstance(x, torch.Tensor) and x.requires_grad else x for x in given]

            names = list(kwargs)
            values = mark([*args, *kwargs.values()], True)
            out = plain(*values[: len(args)], **dict(zip(names, values[len(args) :], strict=True)))
            if isinstance(out, torch.Tensor):
                return mark([out], False)[0]
            return tuple(mark(list(out), False))

        setattr(owner, method, timed)

    def milliseconds(self) -> dict[str, tuple[float, float]]:
        """{part: (forward ms, backward ms)}, summed over all calls."""
        torch.cuda.synchronize()
        out: dict[str, list[float]] = {}
        for (part, direction), pairs in self.events.items():
            total = sum(pair[0].elapsed_time(pair[1]) for pair in pairs if len(pair) == 2)
            out.setdefault(part, [0.0, 0.0])[direction == "backward"] += total
        return {part: (forward, backward) for part, (forward, backward) in out.items()}


def watch_model(parts: Parts, model: Any) -> None:
    """Watch every part of a Megatron GPTModel. Deterministic norms are watched apart from the residual adds."""
    # A mark gives a module another tensor than the one its norm waits on.
    from megatron_plugins.modules.adds_before_norms import separate_adds_from_norms

    separate_adds_from_norms(model.decoder)
    parts.watch(model.embedding, "forward", "embedding")
    for layer in model.decoder.layers:
        attention, mlp = layer.self_attention, layer.mlp
        parts.watch(layer, "forward", "layer")
        parts.watch(attention, "forward", "attention block")
        parts.watch(mlp, "forward", "MLP block")
        # TransformerEngine's spec has norm and linear in one module and identities where the norms were.
        for owner, name, part in (
            (layer, "input_layernorm", "norms"),
            (layer, "pre_mlp_layernorm", "norms"),
            (attention, "q_layernorm", "q/k norms"),
            (attention, "k_layernorm", "q/k norms"),
            (attention, "linear_qkv", "QKV and output projection"),
            (attention, "linear_proj", "QKV and output projection"),
            (attention, "core_attention", "core attention"),
            (mlp, "linear_fc1", "gate, up and down projection"),
            (mlp, "linear_fc2", "gate, up and down projection"),
        ):
            module = getattr(owner, name, None)
            if module is not None and "Identity" not in type(module).__name__:
                parts.watch(module, "forward", part)
    if model.decoder.final_layernorm is not None:
        parts.watch(model.decoder.final_layernorm, "forward", "norms")
    parts.watch(model.output_layer, "forward", "output layer")
    parts.watch(model, "compute_language_model_loss", "loss")


BY_DIFFERENCE = {
    "RoPE, reshapes": (
        "attention block",
        ("QKV and output projection", "core attention", "q/k norms"),
    ),
    "SwiGLU": ("MLP block", ("gate, up and down projection",)),
}
"""Parts that are functions: what a block takes without its modules."""


def table(measured: dict[str, tuple[float, float]], step: float) -> dict[str, dict[str, float]]:
    """{part: {"forward", "backward"}} in ms whose sum is `step`: blocks replaced by what they hold, and the rest."""
    zero = (0.0, 0.0)
    out = dict(measured)
    for name, (block, inside) in BY_DIFFERENCE.items():
        whole = out.get(block, zero)
        held = [out.get(part, zero) for part in inside]
        out[name] = (whole[0] - sum(h[0] for h in held), whole[1] - sum(h[1] for h in held))
    for block in ("layer", "attention block", "MLP block"):
        out.pop(block, None)
    rest = step - sum(forward + backward for forward, backward in out.values())
    rows = {part: {"forward": forward, "backward": backward} for part, (forward, backward) in out.items()}
    rows["residual adds, gradient buffers, the rest"] = {"forward": rest, "backward": 0.0}
    return rows
