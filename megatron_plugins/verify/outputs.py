"""Where a command will write, found out before it has worked for half an hour."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def output_folder(text: str) -> Path:
    """Type of an option that names a folder; makes it.

    Raises:
        argparse.ArgumentTypeError: it cannot be made, or nothing can be written there.
    """
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"sought a folder {path} to write into, found {error}; name another one"
        ) from error
    if not os.access(path, os.W_OK):
        raise argparse.ArgumentTypeError(
            f"sought a folder {path} to write into, found it read-only; name another one"
        )
    return path


def output_file(text: str) -> Path:
    """Type of an option that names a file; makes its folder.

    Raises:
        argparse.ArgumentTypeError: the folder cannot be made or written to, or the file is a folder.
    """
    path = Path(text)
    output_folder(str(path.parent))
    if path.is_dir() or (path.exists() and not os.access(path, os.W_OK)):
        raise argparse.ArgumentTypeError(f"sought a file {path} to write, found what cannot be written")
    return path


def output_file_or_stdout(text: str) -> str:
    """The same where ``-`` stands for standard output."""
    return text if text == "-" else str(output_file(text))


def add_json(parser: argparse.ArgumentParser) -> None:
    """``--json [FILE]``, of every check and benchmark: None without it, ``-`` without a file."""
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", type=output_file_or_stdout,
        help="write the report as JSON there as well; without a file: to standard output, the table to standard error",
    )  # fmt: skip


@contextlib.contextmanager
def json_alone(asked: str | None) -> Iterator[None]:
    """Where ``--json`` asked for standard output, whatever is printed inside goes to standard error."""
    with contextlib.redirect_stdout(sys.stderr) if asked == "-" else contextlib.nullcontext():
        yield


def write_json(asked: str | None, report: Any, indent: int = 1) -> None:
    """Write `report` where ``--json`` asked for it."""
    text = json.dumps(report, indent=indent)
    if asked == "-":
        print(text)
    elif asked is not None:
        Path(asked).write_text(text + "\n", encoding="utf-8")
