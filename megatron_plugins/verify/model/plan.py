"""What `verify model` runs: the model's shapes and the rows. No torch here: the command line answers at once."""

from __future__ import annotations

from dataclasses import dataclass

COLUMNS = ("logits", "log-probs", "loss", "gradients", "gradient norm", "weights")
"""What every run leaves behind: of the first step the logits, the log-probability of each next token, the loss of each
token and every gradient (after three accumulated micro-batches); the gradient norm of each step; the weights after the
last step."""

BASELINE = "one rank"
"""The run that everything is compared with: TP, CP and PP of one."""


@dataclass(frozen=True)
class Shape:
    """Sizes of the model and of its data.

    Attributes:
        layers, hidden, ffn, heads, groups, head_dim: of the transformer; `groups` are the KV heads.
        vocabulary: padded, a multiple of 1024.
        sequence: tokens of one row.
        batch: rows of a micro-batch.
        micro_batches: accumulated before a step.
        steps: optimizer steps.
        init_std: standard deviation of the random weights.
    """

    name: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    head_dim: int
    vocabulary: int
    sequence: int
    batch: int
    micro_batches: int = 3
    steps: int = 3
    init_std: float = 0.1


SHAPES = {
    "small": Shape("small", 2, 64, 192, 16, 8, 16, 1024, 128, 2),
    "tiny": Shape("tiny", 1, 64, 192, 8, 4, 16, 1024, 64, 2, steps=3),
    # Layer of Qwen3-8B (its config.json); few layers and a part of the vocabulary of 151,936.
    "qwen3-8b-layers": Shape("qwen3-8b-layers", 2, 4096, 12288, 32, 8, 128, 16384, 512, 2, init_std=0.02),
}
DEFAULT_SHAPE = {"cpu": "small", "cuda": "qwen3-8b-layers"}


@dataclass(frozen=True)
class Row:
    """One run beside the baseline.

    Attributes:
        kind: "layout"; "rebuild", the same model built again in the same process; "actor", the same after other shapes
            have passed through the process; "packed", the rows of a micro-batch laid one after the other; "alone", the
            first row of each micro-batch without the others.
        cp_layout: how a sequence is cut over context-parallel ranks. Megatron cuts zigzag.
    """

    name: str
    kind: str = "layout"
    tp: int = 1
    cp: int = 1
    pp: int = 1
    sp: bool = False
    cp_layout: str = "zigzag"

    @property
    def ranks(self) -> int:
        return self.tp * self.cp * self.pp

    @property
    def columns(self) -> tuple[str, ...]:
        """What the row can be compared in. A row alone has another gradient than its batch."""
        return COLUMNS[:3] if self.kind == "alone" else COLUMNS


@dataclass(frozen=True)
class Setting:
    """What all rows of one side share."""

    shape: Shape
    dtype: str
    device: str
    side: str


ROWS = (
    Row("rebuild", "rebuild"),
    Row("reference vs actor", "actor"),
    Row("one row alone", "alone"),
    Row("packed", "packed"),
    Row("packed TP2+SP", "packed", tp=2, sp=True),
    Row("packed CP2", "packed", cp=2),
    Row("packed CP4", "packed", cp=4),
    Row("packed TP2xCP2+SP", "packed", tp=2, cp=2, sp=True),
    Row("packed PP2", "packed", pp=2),
    Row("TP2", tp=2),
    Row("TP2+SP", tp=2, sp=True),
    Row("CP2", cp=2),
    Row("CP2 contiguous", cp=2, cp_layout="contiguous"),
    Row("PP2", pp=2),
    Row("TP4", tp=4),
    Row("CP4", cp=4),
    Row("TP2xCP2+SP", tp=2, cp=2, sp=True),
    Row("TP2xPP2", tp=2, pp=2),
    Row("TP8", tp=8),
    Row("TP4xCP2+SP", tp=4, cp=2, sp=True),
)
BY_NAME = {row.name: row for row in ROWS}

SIDES = ("upstream", "te", "ring", "deterministic")
"""Who computes: Megatron's local spec; its TransformerEngine spec; the local spec with TransformerEngine's ring as core
attention, on CPU ranks; ours."""


def why_not(row: Row, side: str, shape: Shape, device: str, gpus: int) -> str | None:
    """Why a side cannot run a row, in words, or None.

    Args:
        device: "cpu" or "cuda".
        gpus: how many GPUs this machine shows.
    """
    if shape.layers % row.pp:
        return f"{shape.layers} layers on {row.pp} pipeline stages"
    if shape.groups % row.tp:
        return f"{shape.groups} KV groups on {row.tp} tensor-parallel ranks"
    held = shape.sequence // row.cp
    # Zigzag cuts what a rank holds into two runs.
    runs = [
        held // 2 if row.cp > 1 and row.cp_layout == "zigzag" else held,
        held // row.tp if row.sp else held,
    ]
    if shape.sequence % (2 * row.cp) or any(run % 16 for run in runs):
        return f"sequence length {shape.sequence}: a rank's runs of {min(runs)} positions are no whole granules of 16"
    if device == "cuda" and row.pp > 1 and gpus < row.ranks:
        return (
            f"{row.ranks} ranks on {gpus} GPU: pipeline stages send tensors point to point, which gloo does not do for "
            "GPU memory and NCCL not inside one GPU"
        )
    if side == "deterministic":
        return None
    if row.kind == "packed" and side == "upstream":
        return "the core attention of Megatron's local spec takes no packed sequences"
    if row.cp_layout != "zigzag":
        return "Megatron cuts sequences zigzag alone"
    if side == "upstream" and row.cp > 1:
        return "the core attention of Megatron's local spec refuses context parallelism"
    if side in ("upstream", "ring") and row.sp:
        return "torch's norm in Megatron's local spec refuses sequence parallelism"
    if side == "ring" and (row.cp == 1 or row.kind != "layout"):
        return "measured with Megatron's own core attention"
    if side == "te" and device == "cuda" and row.cp > 1 and gpus < row.ranks:
        return f"TransformerEngine's ring sends point to point: needs {row.ranks} GPUs, this machine shows {gpus}"
    return None


def selected(names: list[str] | None, max_ranks: int) -> list[Row]:
    """The rows of these names, in this order, or all of at most `max_ranks` ranks.

    Raises:
        ValueError: a name that is none.
    """
    if not names:
        return [row for row in ROWS if row.ranks <= max_ranks]
    if unknown := [name for name in names if name not in BY_NAME]:
        raise ValueError(f"unknown row {', '.join(map(repr, unknown))}; known: {', '.join(BY_NAME)}")
    return [BY_NAME[name] for name in dict.fromkeys(names)]
