"""A residual add and the norm behind it are one pass, with the bits of two: forward, backward, whatever lies between.

Each case runs a model twice with the same weights: adds joined with norms, as every deterministic model is built, and
apart. Passes over the residual stream are counted, so a case that silently ran apart fails.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bits import assert_equal_bits
from procs import run_ranks

ROOT = Path(__file__).resolve().parents[2]
ARMED: dict[str, Any] = {
    "env": {"DETERMINISTIC_ROCM": "invariant"},
    "imports": ("patches.auto", "megatron.core.models.gpt"),
}
ADD_NORM, NORM = "add_rmsnorm", "rmsnorm"
ADD_NORM_BACKWARD, NORM_BACKWARD = "add_rmsnorm_backward_partials", "rmsnorm_backward_partials"
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def _small_model() -> Any:
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
    from megatron_plugins.verify.model import on_cpu

    on_cpu.install()
    import small_model

    return small_model


@contextlib.contextmanager
def _counted() -> Iterator[Counter[str]]:
    """Calls of the norms' operations over rows of the hidden size."""
    from te_overrides.kernels.rmsnorm import ops

    calls: Counter[str] = Counter()
    plain = {name: getattr(ops, name) for name in (ADD_NORM, NORM, ADD_NORM_BACKWARD, NORM_BACKWARD)}

    def counting(name: str) -> Callable[..., Any]:
        def call(x: torch.Tensor, *args: Any) -> Any:
            if x.dim() == 3:  # q/k-norms have a dimension of heads
                calls[name] += 1
            return plain[name](x, *args)

        return call

    for name in plain:
        setattr(ops, name, counting(name))
    yield calls
    for name, function in plain.items():
        setattr(ops, name, function)


def _both(
    layout: Any, run: Callable[[Any], dict[str, Any]], spec: Any = "deterministic", **changes: Any
) -> dict[str, Any]:
    """{"joined", "apart": results of `run(model)` and calls}."""
    small_model = _small_model()
    from megatron_plugins.modules.adds_before_norms import separate_adds_from_norms

    config = small_model.config_for(layout, torch.bfloat16)
    out = {}
    for form in ("joined", "apart"):
        plain, small_model.config_for = small_model.config_for, lambda *_: replace(config, **changes)
        model = small_model.build(layout, torch.bfloat16, spec)
        small_model.config_for = plain
        if form == "apart":
            separate_adds_from_norms(model.decoder)
        with _counted() as calls:
            out[form] = {**run(model), "calls": dict(calls)}
    return out


def _steps(layout: Any) -> Callable[[Any], dict[str, Any]]:
    small_model = _small_model()
    tokens = small_model.byte_tokens(ROOT / "docs", 2)
    return lambda model: small_model.run_model(model, layout, tokens)


def run_layouts(rank: int, world: int, layouts: list[tuple[int, int, bool]]) -> dict[str, Any]:
    """Both forms in every layout."""
    small_model = _small_model()
    out = {}
    for tp, cp, sp in layouts:
        layout = small_model.layout_of(tp, cp, sp)
        small_model.initialize(layout)
        out[f"TP{tp} CP{cp} SP{sp}"] = _both(layout, _steps(layout))
    return out


def _frozen(layout: Any, freeze: Callable[[str], bool]) -> Callable[[Any], dict[str, Any]]:
    """One step with some parameters frozen; gradients of the others."""
    small_model = _small_model()
    (tokens,) = small_model.byte_tokens(ROOT / "docs", 1)

    def run(model: Any) -> dict[str, Any]:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not freeze(name))
        results = small_model.step(model, layout, tokens)
        return {
            **results,
            "gradients": {n: p.grad for n, p in model.named_parameters() if p.grad is not None},
        }

    return run


def _forward(model: Any) -> torch.Tensor:
    small_model = _small_model()
    ids = small_model.byte_tokens(ROOT / "docs", 1)[0, :, :-1]
    positions = torch.arange(ids.shape[1]).expand(ids.shape[0], -1).contiguous()
    mask = ~torch.ones(1, 1, ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
    logits: torch.Tensor = model(ids, positions, mask)
    return logits


def _without_gradients(mode: Callable[[], Any]) -> Callable[[Any], dict[str, Any]]:
    def run(model: Any) -> dict[str, Any]:
        asked = []
        for layer in model.decoder.layers:
            layer.register_forward_hook(lambda _m, _a, out: asked.append(out[0].requires_grad))
        with mode():
            return {"logits": _forward(model).clone(), "records": any(asked)}

    return run


def _steered(model: Any) -> dict[str, Any]:
    """The sum that a layer returns is written into by a hook, as in activation steering."""

    def steer(_module: Any, _args: Any, out: tuple[torch.Tensor, Any]) -> None:
        out[0].add_(0.5)

    model.decoder.layers[0].register_forward_hook(steer)
    with torch.no_grad():
        return {"logits": _forward(model)}


def _with_gradients(model: Any) -> dict[str, Any]:
    logits = _forward(model)
    logits.float().square().mean().backward()
    return {"logits": logits.detach(), "gradients": {n: p.grad for n, p in model.named_parameters()}}


def _norm_hooked(model: Any) -> dict[str, Any]:
    """A pre-hook of a norm gives it another tensor."""
    model.decoder.layers[0].pre_mlp_layernorm.register_forward_pre_hook(lambda _m, args: (args[0] * 2,))
    return _with_gradients(model)


def _layer_hooked(model: Any) -> dict[str, Any]:
    """A hook of a layer returns another tensor than the one whose norm waits."""
    model.decoder.layers[0].register_forward_hook(lambda _m, _a, out: (out[0] * 2, out[1]))
    return _with_gradients(model)


def _on_its_way(model: Any) -> dict[str, Any]:
    """Weights that arrive when Megatron's hook waits for them, as with --overlap-param-gather."""
    from megatron.core.distributed import DistributedDataParallel

    class Bucket:
        def __init__(self, parameter: torch.nn.Parameter) -> None:
            self.parameter, self.value = parameter, parameter.detach().clone()
            parameter.data.fill_(float("nan"))

        def finish_param_sync(self, skip_next_bucket_dispatch: bool = False) -> None:
            self.parameter.data.copy_(self.value)

    ddp = SimpleNamespace(
        use_forward_hook=True,
        param_to_bucket_group={p: Bucket(p) for n, p in model.named_parameters() if "layernorm" in n},
        ddp_config=SimpleNamespace(align_param_gather=False),
        overlap_param_gather_with_optimizer_step=False,
    )
    for module in model.modules():
        module.register_forward_pre_hook(DistributedDataParallel._make_forward_pre_hook(ddp))
    with torch.no_grad():
        return {"logits": _forward(model)}


def run_cases(rank: int, world: int) -> dict[str, Any]:
    """Both forms on one rank, in every case that lies between an add and its norm."""
    small_model = _small_model()
    from megatron_plugins.layer_specs import deterministic_gpt_layer_spec_with_te_names as te_names

    layout = small_model.layout_of()
    small_model.initialize(layout)
    steps = _steps(layout)
    selective = {"recompute_granularity": "selective"}
    return {
        "plain": _both(layout, steps),
        "TE names": _both(layout, steps, te_names),
        "biases": _both(layout, steps, add_bias_linear=True),
        "full recompute": _both(layout, steps, **FULL),
        "MLP recomputed": _both(layout, steps, te_names, **selective, recompute_modules=["mlp"]),
        "float32 residual": _both(layout, steps, fp32_residual_connection=True),
        "frozen norms": _both(layout, _frozen(layout, lambda name: "layernorm" in name)),
        "frozen below": _both(
            layout, _frozen(layout, lambda name: "embedding" in name or "layers.0." in name)
        ),
        "no_grad": _both(layout, _without_gradients(torch.no_grad)),
        "inference mode": _both(layout, _without_gradients(torch.inference_mode)),
        "written into": _both(layout, _steered),
        "norm hooked": _both(layout, _norm_hooked),
        "layer hooked": _both(layout, _layer_hooked),
        "weights on their way": _both(layout, _on_its_way),
    }


@pytest.fixture(scope="module")
def cases() -> dict[str, Any]:
    results: dict[str, Any] = run_ranks(1, run_cases, **ARMED)[0]
    return results


def _assert_same(case: str, both: dict[str, Any]) -> None:
    joined, apart = both["joined"], both["apart"]
    for what in ("logits", "logprobs", "loss"):
        if what in apart:
            assert bool(torch.isfinite(apart[what]).all())
            assert_equal_bits(joined[what], apart[what], f"{case}: {what}")
    gradients = apart.get("gradients", {})
    assert joined.get("gradients", {}).keys() == gradients.keys()
    for parameter, gradient in gradients.items():
        assert_equal_bits(joined["gradients"][parameter], gradient, f"{case}: gradient of {parameter}")


CASES = (
    "plain",
    "TE names",
    "biases",
    "full recompute",
    "MLP recomputed",
    "float32 residual",
    "frozen norms",
    "frozen below",
    "no_grad",
    "inference mode",
    "written into",
    "norm hooked",
    "layer hooked",
    "weights on their way",
)


@pytest.mark.parametrize("case", CASES)
def test_one_pass_has_the_bits_of_two(case: str, cases: dict[str, Any]) -> None:
    _assert_same(case, cases[case])


def test_every_case_is_compared(cases: dict[str, Any]) -> None:
    assert cases.keys() == set(CASES)


@pytest.mark.parametrize("case", ["plain", "TE names", "biases", "float32 residual"])
def test_every_norm_behind_an_add_is_one_pass_with_it(case: str, cases: dict[str, Any]) -> None:
    """All but the first norm follow an add; all but the last share their input's gradient with another add."""
    names = cases[case]["apart"]["gradients"]
    layers = len({name.split(".")[2] for name in names if name.startswith("decoder.layers.")})
    joined, apart = cases[case]["joined"]["calls"], cases[case]["apart"]["calls"]
    forwards, backwards = apart[NORM] // (2 * layers + 1), apart[NORM_BACKWARD] // (2 * layers + 1)
    assert apart.keys() == {NORM, NORM_BACKWARD} and backwards
    assert joined == {
        NORM: forwards,
        ADD_NORM: 2 * layers * forwards,
        NORM_BACKWARD: 2 * backwards,
        ADD_NORM_BACKWARD: (2 * layers - 1) * backwards,
    }


@pytest.mark.parametrize("case", sorted(set(CASES) - {"written into", "layer hooked"}))
def test_no_norm_is_computed_in_vain(case: str, cases: dict[str, Any]) -> None:
    joined, apart = cases[case]["joined"]["calls"], cases[case]["apart"]["calls"]
    assert joined.get(NORM, 0) + joined.get(ADD_NORM, 0) == apart[NORM]
    if case != "inference mode":
        assert joined.get(ADD_NORM), f"{case}: no add was joined with a norm"


@pytest.mark.parametrize("case", ["written into", "layer hooked"])
def test_a_sum_that_is_no_longer_the_same_is_normed_again(case: str, cases: dict[str, Any]) -> None:
    joined, apart = (cases[case][form]["calls"] for form in ("joined", "apart"))
    assert joined[NORM] + joined[ADD_NORM] == apart[NORM] + 1


def test_tensors_that_do_not_count_their_changes_are_normed_when_asked_for(cases: dict[str, Any]) -> None:
    assert cases["inference mode"]["joined"]["calls"] == cases["inference mode"]["apart"]["calls"]


def test_no_graph_is_recorded_where_gradients_are_off(cases: dict[str, Any]) -> None:
    assert cases["no_grad"]["joined"]["records"] is False


def test_one_pass_has_the_bits_of_two_in_every_layout() -> None:
    results = run_ranks(2, run_layouts, [(2, 1, True), (1, 2, False)], timeout=240, **ARMED)[0]
    for layout, both in results.items():
        _assert_same(layout, both)
        assert both["joined"]["calls"] == results["TP2 CP1 SPTrue"]["joined"]["calls"]
        assert both["joined"]["calls"][ADD_NORM_BACKWARD]
