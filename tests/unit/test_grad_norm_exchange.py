"""The gradient norm's exchange lies where its group's backend takes it, wherever the gradients lie."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_plugins.overrides.grad_norm import build
from te_overrides.kernels import devices
from te_overrides.kernels.grad_norm import reference

GPU = torch.device("cuda", 3)


class _Anywhere(torch.Tensor):
    """A CPU tensor that goes nowhere and writes down where it was sent."""

    sent: Any = None

    def to(self, device: Any) -> Any:  # type: ignore[override]
        type(self).sent = device
        return self


@pytest.mark.parametrize(
    ("backends", "gradients", "want"),
    [
        ("cpu:gloo,cuda:gloo", "cuda", torch.device("cpu")),
        ("cuda:nccl", "cpu", GPU),
        ("cuda:nccl", None, GPU),
        ("cpu:gloo,cuda:nccl", "cuda", GPU),
        # A rank without gradients must wait where its peers do.
        ("cpu:gloo,cuda:nccl", None, GPU),
    ],
)
def test_the_exchange_lies_where_the_group_takes_it(
    backends: str, gradients: str | None, want: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "square_bins", lambda _: torch.zeros(3, 2, dtype=torch.int64))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: GPU.index)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda _=None: "nccl" if backends == "cuda:nccl" else backends)
    monkeypatch.setattr(dist, "get_backend_config", lambda _=None: backends)
    monkeypatch.setattr(dist, "all_reduce", lambda *_a, **_k: None)
    plain = torch.cat
    monkeypatch.setattr(torch, "cat", lambda x: plain(x).as_subclass(_Anywhere))
    grads = [types.SimpleNamespace(device=torch.device(gradients))] if gradients else []
    norm = build(lambda *_: pytest.fail("upstream's norm was asked"))
    assert norm(grads, 2.0, None) == 0.0 and _Anywhere.sent == want


def test_what_torch_says_of_a_gloo_group_is_understood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        assert (
            devices.device_of_group(None) == devices.device_of_group(dist.group.WORLD) == torch.device("cpu")
        )
    finally:
        dist.destroy_process_group()
