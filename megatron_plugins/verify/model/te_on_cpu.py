"""Real TransformerEngine Python sources on a machine without a GPU.

Faked, and nothing else: the compiled module ``transformer_engine_torch`` (a symbol raises when it is *called*), CUDA
streams and events, and FlashAttention's kernel pair (plain torch in float64 with one rounding, so that whatever differs
between two layouts comes from upstream's own context-parallel code). Every ``.py`` that runs is upstream's.
"""

from __future__ import annotations

import ast
import contextlib
import enum
import importlib
import os
import sys
import types
from pathlib import Path
from typing import Any

import torch

CONTEXT_PARALLEL = "transformer_engine.pytorch.attention.dot_product_attention.context_parallel"


class _Symbol:
    """A compiled symbol: importable, comparable, hashable; raises when called."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _Symbol(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{self.__name__} is a compiled symbol of transformer_engine_torch")

    def __int__(self) -> int:
        return hash(self.__name__) & 0xFFFF

    __index__ = __int__


class _SymbolType(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _Symbol(f"{cls.__name__}.{name}")
        setattr(cls, name, value)
        return value

    def __iter__(cls) -> Any:
        return iter(())


def _binding(name: str, tensors: int, flags: int) -> Any:
    """A compiled function as it looks from outside: pybind11's signature, and nothing that could be called."""

    def binding(*_: Any) -> None:
        raise NotImplementedError(f"{name} is a compiled symbol of transformer_engine_torch")

    kinds = ["torch.Tensor"] * tensors + ["bool"] * flags
    arguments = ", ".join(f"arg{index}: {kind}" for index, kind in enumerate(kinds))
    binding.__name__ = binding.__qualname__ = name
    binding.__doc__ = f"{name}({arguments}) -> None"
    return binding


class _CompiledModule(types.ModuleType):
    def __init__(self, package: Path, enums: dict[str, dict[str, int]], incremental: bool) -> None:
        super().__init__("transformer_engine_torch")
        # Where a wheel has it: the release of a compiled module is read beside its file.
        self.__file__ = str(package / "wheel_lib" / "transformer_engine_torch.so")
        self._enums = enums
        # From 2.20 on the correction takes the old LSE as well.
        self.thd_out_correction = _binding("thd_out_correction", 6 if incremental else 5, 2)
        self.thd_second_half_lse_correction = _binding("thd_second_half_lse_correction", 3, 1)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if self._enums.get(name):
            # Compared member by member while upstream is imported.
            make: Any = enum.IntEnum
            value: Any = make(name, self._enums[name], module=self.__name__)
        elif name[:1].isupper():
            value = _SymbolType(name, (), {"__module__": self.__name__})
        else:
            value = _Symbol(name)
        setattr(self, name, value)
        return value


def _members(path: Path, cls: str) -> dict[str, int]:
    """Member names of an enum in upstream's own file; values are placeholders."""
    if not path.exists():
        return {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name == cls:
            names = [
                a.targets[0].id
                for a in node.body
                if isinstance(a, ast.Assign) and isinstance(a.targets[0], ast.Name)
            ]
            return {name: value for value, name in enumerate(names)}
    return {}


def load(sources: Path) -> types.ModuleType:
    """Import upstream's context-parallel module from unpacked sources.

    Args:
        sources: a folder that holds ``transformer_engine/`` (an unpacked wheel).

    Raises:
        FileNotFoundError: no such sources there.
    """
    package = sources / "transformer_engine"
    if not (package / "pytorch").is_dir():
        raise FileNotFoundError(
            f"no TransformerEngine sources in {sources}: sought transformer_engine/pytorch. Run scripts/quickstart.sh, "
            "which unpacks them into .venv/transformer-engine-sources."
        )
    os.environ.setdefault("NVTE_PROJECT_BUILDING", "1")  # skips the check for a compiled core
    fused = package / "pytorch" / "cpp_extensions" / "fused_attn.py"
    enums = {
        "DType": _members(package / "pytorch" / "constants.py", "DType"),
        "NVTE_Fused_Attn_Backend": {f"NVTE_{k}": v for k, v in _members(fused, "FusedAttnBackend").items()},
    }
    source = package / "pytorch" / "attention" / "dot_product_attention" / "context_parallel.py"
    incremental = source.is_file() and "flash_attn_fwd_incremental_out_correction" in source.read_text()
    sys.modules["transformer_engine_torch"] = _CompiledModule(package, enums, incremental)
    bare = types.ModuleType("transformer_engine")
    bare.__path__ = [str(package)]
    sys.modules["transformer_engine"] = bare
    common = importlib.import_module("transformer_engine.common")
    common.load_framework_extension = lambda _framework: None  # type: ignore[attr-defined]
    return importlib.import_module(CONTEXT_PARALLEL)


class FakeStream:
    """A stream that has nothing to wait for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_a, **_k: None


def _scores(q: torch.Tensor, k: torch.Tensor, scale: float, causal: bool) -> torch.Tensor:
    """q [b, sq, h, d], k [b, sk, hk, d] -> masked scores [b, h, sq, sk] float64; causal aligned bottom right."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) * scale
    if causal:
        sq, sk = scores.shape[-2:]
        scores = scores.masked_fill(~torch.ones(sq, sk, dtype=torch.bool).tril(sk - sq), float("-inf"))
    return scores


def flash_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float = 0.0, softmax_scale: float = 1.0,
    causal: bool = False, window_size_left: int = -1, window_size_right: int = -1, **_: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """FlashAttention 2.7's ``_flash_attn_forward`` on [b, s, h, d]: (out, lse [b, h, s] float32, None, rng state)."""
    scores = _scores(q, k, softmax_scale, causal or window_size_right == 0)
    lse = torch.logsumexp(scores, -1)
    p = torch.exp(scores - lse.unsqueeze(-1))
    out = torch.einsum("bhqk,bkhd->bqhd", p, v.double().repeat_interleave(q.shape[2] // v.shape[2], 2))
    return out.to(q.dtype).contiguous(), lse.float().contiguous(), None, torch.zeros(2, dtype=torch.int64)


def flash_backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, dropout_p: float = 0.0, softmax_scale: float = 1.0,
    causal: bool = False, window_size_left: int = -1, window_size_right: int = -1, **_: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """FlashAttention 2.7's ``_flash_attn_backward``: fills dq, dk, dv."""
    group = q.shape[2] // k.shape[2]
    p = torch.exp(_scores(q, k, softmax_scale, causal or window_size_right == 0) - lse.double().unsqueeze(-1))
    do = dout.double()
    dp = torch.einsum("bqhd,bkhd->bhqk", do, v.double().repeat_interleave(group, 2))
    delta = (do * out.double()).sum(-1).permute(0, 2, 1).unsqueeze(-1)
    ds = p * (dp - delta) * softmax_scale

    def sum_group(x: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = torch.unflatten(x, 2, (-1, group)).sum(3)
        return total

    dq.copy_(torch.einsum("bhqk,bkhd->bqhd", ds, k.double().repeat_interleave(group, 2)))
    dk.copy_(sum_group(torch.einsum("bhqk,bqhd->bkhd", ds, q.double())))
    dv.copy_(sum_group(torch.einsum("bhqk,bqhd->bkhd", p, do)))
    return dq, dk, dv


class _WaitOnce:
    """TE waits twice on a request; gloo's second wait never returns."""

    def __init__(self, request: Any) -> None:
        self.request = request

    def wait(self) -> None:
        request, self.request = self.request, None
        if request is not None:
            request.wait()


def prepare_ring(context_parallel: Any) -> None:
    """Let the loaded module run its ring on CPU tensors over gloo."""
    backends: Any = importlib.import_module(
        "transformer_engine.pytorch.attention.dot_product_attention.backends"
    )
    utils = importlib.import_module("transformer_engine.pytorch.attention.dot_product_attention.utils")
    extensions: Any = importlib.import_module("transformer_engine.pytorch.cpp_extensions")
    cuda: Any = torch.cuda
    cuda.current_stream = lambda *_: FakeStream()
    cuda.stream = lambda _stream: contextlib.nullcontext()
    cuda.Event = lambda *_a, **_k: FakeStream()
    cuda.current_device = lambda: torch.device("cpu")
    cuda.get_device_properties = lambda _d=0: types.SimpleNamespace(
        major=9, minor=0, name="cpu", multi_processor_count=1
    )
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *_: None
    context_parallel.get_device_compute_capability = lambda: (9, 0)
    extensions.get_cudnn_version = lambda: 91800
    for name in ("v2_3_plus", "v2_4_plus", "v2_4_1_plus", "v2_5_7_plus", "v2_6_0_plus", "v2_7_0_plus"):
        setattr(utils.FlashAttentionUtils, name, True)
    backends._flash_attn_fwd, backends._flash_attn_bwd = flash_forward, flash_backward
    exchange = context_parallel.flash_attn_p2p_communicate
    context_parallel.flash_attn_p2p_communicate = lambda *a: [_WaitOnce(request) for request in exchange(*a)]
