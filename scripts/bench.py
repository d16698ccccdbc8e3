"""``python scripts/bench.py WHAT``: benchmarks against the peers, measured in the same run."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "benchmarks")]

from megatron_plugins.verify.interrupts import run_until_interrupted  # noqa: E402

BENCHMARKS = {
    "collectives": "sums and gathers over ranks against the library's own",
    "ffn": "the feed-forward block against transformers' Qwen3MLP",
    "attention": "attention against cuDNN, flash attention and TransformerEngine",
    "model": "a training step of a Megatron GPT, part by part",
}
"""Name of a module in scripts/benchmarks with ``add_arguments(parser)`` and ``run(args) -> status`` -> one line."""


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark that is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="benchmark", required=True, metavar="WHAT")
    for name, line in BENCHMARKS.items():
        importlib.import_module(name).add_arguments(commands.add_parser(name, help=line, description=line))
    args = parser.parse_args(argv)
    return run_until_interrupted(importlib.import_module(args.benchmark).run, args)


if __name__ == "__main__":
    sys.exit(main())
