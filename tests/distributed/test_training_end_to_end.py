"""Megatron's own training stack, under torchrun where there are several ranks: three steps, equal in every layout.

megatron-core 0.17.1 is the newest release whose wheel carries ``megatron.training`` and runs on Python 3.10 and 3.11.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bits import assert_equal_bits
from upstream_wheels import sources

ROOT = Path(__file__).resolve().parents[2]
MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 8 --group-query-attention --num-query-groups 4 "
    "--kv-channels 16 --ffn-hidden-size 192 --seq-length 128 --max-position-embeddings 128 --micro-batch-size 1 "
    "--global-batch-size 3 --swiglu --normalization RMSNorm --qk-layernorm --disable-bias-linear --hidden-dropout 0 "
    "--attention-dropout 0 --position-embedding-type rope --untie-embeddings-and-output-weights "
    "--calculate-per-token-loss --use-cpu-initialization --no-rope-fusion --no-masked-softmax-fusion "
    "--no-gradient-accumulation-fusion --no-persist-layer-norm --transformer-impl local --lr 1e-3 --train-iters 3 "
    "--bf16"
).split()
LAYOUTS = {
    "TP2xCP2+SP, distributed optimizer": (4, "--make-vocab-size-divisible-by 512 --tensor-model-parallel-size 2 "
                                          "--context-parallel-size 2 --sequence-parallel --use-distributed-optimizer"),
    "PP2": (2, "--make-vocab-size-divisible-by 1024 --pipeline-model-parallel-size 2"),
    "TP4+SP": (4, "--make-vocab-size-divisible-by 256 --tensor-model-parallel-size 4 --sequence-parallel"),
}  # fmt: skip
ONE = "--make-vocab-size-divisible-by 1024"
FOR_OTHER_MODULES = (
    "megatron.tensor_parallel.reduce",
    "megatron.tensor_parallel.reduce_scatter",
    "megatron.linear.reduce_scatter",
    "megatron.linear.input_gradient",
    "megatron.frozen_linear.input_gradient",
    "megatron.paged_attention",
)
"""Sums of upstream's own modules over tensor-parallel ranks: a model of ours has none of these modules. Pages: of
inference."""
NEVER_IMPORTED = "megatron.hybrid_model.outer_parts"
"""The seam of a model that a GPT's training does not import."""


def train(
    result: Path, ranks: int, arguments: str, *, armed: bool = True, **environment: str
) -> subprocess.CompletedProcess[str]:
    """torchrun -m patches run tests/pretrain_small.py …, or without the layer; one rank without torchrun, whose own
    imports take as long as the steps."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    launcher += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    alone = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    entry = ["-m", "patches", "run", "tests/pretrain_small.py"] if armed else ["tests/pretrain_small.py"]
    env = {
        **os.environ,
        "PYTHONPATH": f"{sources('0.17.1', 'megatron-core')}{os.pathsep}{ROOT}",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "TORCH_COMPILE_DISABLE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        **(alone if ranks == 1 else {}),
        **environment,
    }
    return subprocess.run(
        [sys.executable, "-W", "ignore", *(launcher if ranks > 1 else []), *entry, "--result", str(result)]
        + [*MODEL, *arguments.split()],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


def output(done: subprocess.CompletedProcess[str]) -> str:
    """What a failed launch said."""
    return (done.stdout + done.stderr)[-6000:]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    result = tmp_path_factory.mktemp("train") / "one.pt"
    ledger = result.with_name("ledger.json")
    done = train(result, 1, f"--deterministic-rocm {ONE}", DETERMINISTIC_ROCM_LEDGER=str(ledger))
    assert done.returncode == 0, output(done)
    said = json.loads(ledger.read_text())
    assert (
        said["written"] == "at exit"
        and f"never called in this process: {', '.join(FOR_OTHER_MODULES)}\n" in done.stdout
    )
    ours = {entry["id"]: entry for entry in said["overrides"] if entry["id"].startswith("megatron.")}
    assert ours.pop(NEVER_IMPORTED)["state"] == "NOT_REQUIRED"
    assert {id for id, entry in ours.items() if not entry["called"]} == set(FOR_OTHER_MODULES), ours
    assert len(ours) > len(FOR_OTHER_MODULES) and {entry["state"] for entry in ours.values()} == {
        "VERIFIED"
    }, ours
    assert "spec ['megatron_plugins.layer_specs', 'deterministic_gpt_layer_spec']" in done.stdout
    return torch.load(result)  # type: ignore[no-any-return]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_gradient_norm_and_weights_after_three_steps_equal_one_rank(
    layout: str, one_rank: dict[str, Any], tmp_path: Path
) -> None:
    ranks, arguments = LAYOUTS[layout]
    done = train(tmp_path / "many.pt", ranks, f"--deterministic-rocm {arguments}")
    assert done.returncode == 0, output(done)
    got = torch.load(tmp_path / "many.pt")
    assert got["norms"] == one_rank["norms"] and len(got["norms"]) == 3 and min(got["norms"]) > 1.0
    for step, (losses, want) in enumerate(zip(got["losses"], one_rank["losses"], strict=True)):
        assert_equal_bits(losses, want, f"losses of step {step}")
    assert got["weights"].keys() == one_rank["weights"].keys()
    for name, want in one_rank["weights"].items():
        assert_equal_bits(got["weights"][name], want, f"{name} after three steps")


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        (f"--deterministic-rocm {ONE}", {"armed": False}, ["unrecognized arguments: --deterministic-rocm"]),
        ("--deterministic-rocm --make-vocab-size-divisible-by 128", {},
         ["NotCoveredError", "make_vocab_size_divisible_by=128", "--make-vocab-size-divisible-by 1024"]),
        (f"--deterministic-rocm {ONE} --hidden-dropout 0.1", {}, ["hidden_dropout=0.1", "--hidden-dropout 0"]),
        (f"--deterministic-rocm=stable {ONE}", {}, ["--deterministic-rocm=stable", "armed as 'invariant'"]),
        (f"--deterministic-rocm {ONE} --spec somebody else", {}, ["--spec somebody else", "rocm=stable"]),
        (f"--deterministic-rocm=fast {ONE}", {}, ["invalid choice: 'fast'"]),
    ],
    ids=["unarmed", "vocabulary", "dropout", "another mode", "foreign spec", "no such mode"],
)  # fmt: skip
def test_a_contradiction_stops_the_job_before_the_model_is_built(
    arguments: str, options: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    done = train(tmp_path / "none.pt", 1, arguments, **options)
    assert done.returncode != 0 and not (tmp_path / "none.pt").exists()
    for word in words:
        assert word in output(done), output(done)


def test_ignoring_unknown_arguments_does_not_drop_the_flag(tmp_path: Path, one_rank: dict[str, Any]) -> None:
    done = train(tmp_path / "one.pt", 1, f"--deterministic-rocm {ONE} --no-such-argument", IGNORE_UNKNOWN="1")
    assert done.returncode == 0, output(done)
    assert torch.load(tmp_path / "one.pt")["norms"] == one_rank["norms"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint after two steps, in a folder that did not exist before."""
    folder = tmp_path_factory.mktemp("save") / "checkpoints"
    arguments = (
        f"--deterministic-rocm {ONE} --train-iters 2 --save {folder} --save-interval 2 --ckpt-format torch"
    )
    done = train(folder.with_name("two.pt"), 1, arguments)
    assert done.returncode == 0, output(done)
    return folder


def resume(saved: Path, tmp_path: Path, change: Callable[[Path], object]) -> subprocess.CompletedProcess[str]:
    """The third step from a copy of the checkpoint whose neighbour ledger was changed."""
    folder = tmp_path / "checkpoints"
    shutil.copytree(saved, folder)
    change(folder / "determinism-ledger.json")
    return train(tmp_path / "third.pt", 1, f"--deterministic-rocm {ONE} --load {folder} --ckpt-format torch")


def test_a_resumed_run_goes_on_with_the_bits_of_one_that_never_stopped(
    saved: Path, one_rank: dict[str, Any], tmp_path: Path
) -> None:
    done = resume(saved, tmp_path, lambda ledger: json.loads(ledger.read_text())["digest"])
    assert done.returncode == 0, output(done)
    got = torch.load(tmp_path / "third.pt")
    assert got["norms"] == one_rank["norms"][2:]
    assert_equal_bits(got["losses"][0], one_rank["losses"][2], "losses of the third step")
    for name, want in one_rank["weights"].items():
        assert_equal_bits(got["weights"][name], want, f"{name} after a resume")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"digest": "f00d"}', ["was written by a run with ledger digest f00d, this run has ", "to go on knowingly"]),
        ("{", ["sought the ledger beside the checkpoint in", "JSONDecodeError", "restore or remove it"]),
    ],
    ids=["another digest", "unreadable"],
)  # fmt: skip
def test_a_resume_beside_another_ledger_stops_in_words(
    text: str, words: list[str], saved: Path, tmp_path: Path
) -> None:
    done = resume(saved, tmp_path, lambda ledger: ledger.write_text(text))
    assert done.returncode != 0 and not (tmp_path / "third.pt").exists()
    for word in ["GateError", str(tmp_path / "checkpoints"), *words]:
        assert word in output(done), output(done)


def test_a_resume_without_a_ledger_goes_on_knowingly(saved: Path, tmp_path: Path) -> None:
    """Removing the file is the way out that the refusal names."""
    done = resume(saved, tmp_path, Path.unlink)
    assert done.returncode == 0 and (tmp_path / "third.pt").exists(), output(done)
