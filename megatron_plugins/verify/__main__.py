"""``python -m megatron_plugins.verify WHAT``: one command a check.

Exit status 0: equal. 1: a mismatch. 2: not run. 130: stopped by Ctrl-C.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys

from megatron_plugins.verify.interrupts import run_until_interrupted

CHECKS = {
    "ffn": (
        "megatron_plugins.verify.ffn.command",
        "the feed-forward block in every layout, for every number of rows",
    ),
    "attention": ("megatron_plugins.verify.attention.command", "context-parallel attention in every layout"),
    "model": ("megatron_plugins.verify.model.command", "a whole Megatron GPT in every layout"),
}
"""Name -> (module with ``add_arguments(parser)`` and ``run(args) -> status``, one line)."""


NEEDED = ("torch", "rich", "matplotlib")
"""Of every check; those that need megatron-core look for it themselves."""


def main(argv: list[str] | None = None) -> int:
    """Run the check that is named."""
    absent = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if absent:
        print(
            f"not run: sought {', '.join(NEEDED)} for {sys.executable}, found no {', no '.join(absent)}. Take the "
            "Python of the environment that trains, with the extra `verify` of this project installed there, or "
            ".venv/bin/python after scripts/quickstart.sh",
            file=sys.stderr,
        )
        return 2
    parser = argparse.ArgumentParser(prog="python -m megatron_plugins.verify", description=__doc__)
    commands = parser.add_subparsers(dest="check", required=True, metavar="WHAT")
    for name, (module, line) in CHECKS.items():
        importlib.import_module(module).add_arguments(commands.add_parser(name, help=line, description=line))
    args = parser.parse_args(argv)
    return run_until_interrupted(importlib.import_module(CHECKS[args.check][0]).run, args)


if __name__ == "__main__":
    sys.exit(main())
