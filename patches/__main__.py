"""``python -m patches status | check | pin | explain | run | enable | disable``."""

from __future__ import annotations

import argparse
import importlib.util
import json
import runpy
import shutil
import sys
import textwrap
from pathlib import Path

from patches import activation, report, schema
from patches.arming import arm, armed_mode, mode_from_environment
from patches.errors import OverrideError
from patches.lock import DERIVED, Lock
from patches.override import BINDING, MODES


def _table(rows: list[list[str]]) -> str:
    """Columns under their headings; one row below the other where the terminal is narrower than that."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    # A pipe or a file has no width.
    columns = shutil.get_terminal_size((10_000, 24)).columns
    if sum(widths) + 2 * len(widths) - 2 > columns:
        lines = []
        for row in rows[1:]:
            named = ", ".join(f"{heading} {cell}" for heading, cell in zip(rows[0][1:], row[1:], strict=True))
            lines += [
                row[0],
                *textwrap.wrap(named, max(columns, 24), initial_indent="    ", subsequent_indent="    "),
            ]
        return "\n".join(lines)
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def _status(args: argparse.Namespace) -> int:
    rows = report.status()
    if args.json:
        print(
            json.dumps({"armed": armed_mode(), "enabled": activation.enabled(), "overrides": rows}, indent=2)
        )
        return 0
    armed = (
        armed_mode() or "no, so every state below is NOT_ARMED; a job's are in its determinism-ledger.json"
    )
    print(f"armed in this process: {armed}\nenabled at interpreter start: {activation.enabled()}")
    print(_table([["override", "state", "installed", "version", "modes"]] + [
        [r["id"], r["state"], r["installed"], r["version"] or "-", "+".join(r["modes"])] for r in rows
    ]))  # fmt: skip
    return 0


def _check(args: argparse.Namespace) -> int:
    lock, overrides = Lock.read(), report.overrides(args.ids)
    if args.load:
        for words in filter(None, [report.load(o) for o in overrides if o.kind == BINDING]):
            print(words, file=sys.stderr)
    findings = [report.examine(override, lock, args.tree) for override in overrides]
    moved = [finding for finding in findings if finding.moved]
    nothing = all(finding.verdict == "not installed" for finding in findings)
    if args.json:
        print(json.dumps([
            {"id": f.override.id, "target": str(f.override.target), "verdict": f.verdict, "fingerprint": f.found,
             "version": f.version, "accepted": f.accepted} for f in findings
        ], indent=2))  # fmt: skip
    else:
        print("\n".join(finding.sentence() for finding in findings))
    if moved:
        print(
            f"{len(moved)} of {len(findings)} targets moved: review them, then `python -m patches pin ID`, or "
            f"install a release that was reviewed.",
            file=sys.stderr,
        )
    if nothing:
        print(
            f"nothing to check: none of the {len(findings)} modules is installed for {sys.executable}"
            if args.tree is None
            else f"nothing to check: none of the {len(findings)} modules lies in {args.tree}; it is the folder that "
            "holds the packages (site-packages, or the root of a checkout)",
            file=sys.stderr,
        )
        return 2
    return 1 if moved else 0


def _pin(args: argparse.Namespace) -> int:
    lock, changed, refused = Lock.read(), 0, False
    for override in report.overrides(args.ids):
        if args.tree is None and (override.kind == BINDING or override.operators):
            # Signatures and schemas are there once their module is; a package that is not installed is told below.
            words = report.load(override)
            if words is not None:
                print(f"{override.id}: {words}", file=sys.stderr)
        finding = report.examine(override, lock, args.tree)
        for operator in override.operators:
            found = schema.registered(operator)
            version = args.version or finding.version
            if found is None or version is None:
                print(f"skipped  operator {operator}: not registered in this process")
            elif lock.accept(schema.lock_key(operator), schema.PREFIX + found, version):
                changed += 1
                print(f"pinned   operator {operator} {version} {found}")
        if finding.refusal is not None:
            print(f"refused  {finding.sentence()}", file=sys.stderr)
            refused = True
            continue
        if finding.found is None:
            print(f"skipped  {finding.sentence()}")
            continue
        version = args.version or finding.version
        if version is None:
            print(
                f"{override.id}: no version beside {finding.file}; give one with --version", file=sys.stderr
            )
            return 2
        if lock.accept(str(override.target), finding.found, version):
            changed += 1
            print(f"pinned   {override.target} {version} {finding.found}")
    if changed:
        lock.write()
    print(f"{changed} new entries in {lock.path}")
    return 2 if refused else 0


def _explain(args: argparse.Namespace) -> int:
    (override,) = report.overrides([args.id])
    lock = Lock.read()
    finding = report.examine(override, lock)
    print(f"{override.id}\n")
    for label, text in (
        ("replaces", str(override.target)),
        ("in modes", ", ".join(override.modes)),
        ("why", override.why),
        ("how", override.how),
        ("until", override.retire_when),
        ("evidence", override.evidence),
        ("versions", override.versions or "all"),
        ("here", finding.sentence()),
    ):
        print(f"  {label:9} {text}")
    for fingerprint, releases in finding.accepted.items():
        print(f"  {'reviewed':9} {fingerprint}  {', '.join(releases)}")
        if derived := lock.derived.get((str(override.target), fingerprint)):
            print(f"  {'':9} {DERIVED}, not seen in a build: {', '.join(derived)}")
    document = sys.modules[override.build.__module__].__doc__
    print(f"\n{(document or '').strip()}")
    return 0


def _enable(args: argparse.Namespace) -> int:
    try:
        for path in activation.enable():
            print(f"wrote {path}")
    except OSError as error:
        print(
            f"sought to write into {activation.folder()}, found {error}. Use a virtual environment, or "
            "`python -m patches run`, which needs no file.",
            file=sys.stderr,
        )
        return 2
    return 0


def _disable(args: argparse.Namespace) -> int:
    try:
        for path in activation.disable():
            print(f"removed {path}")
    except OSError as error:
        print(
            f"sought to remove files from {activation.folder()}, found {error}. The layer stays enabled; it does "
            "nothing while DETERMINISTIC_ROCM is unset and no command line has the flag.",
            file=sys.stderr,
        )
        return 2
    print(f"enabled at interpreter start: {activation.enabled()}")
    return 0


def _absent_module(name: str) -> str | None:
    """Why ``-m name`` cannot start, in words; None where it can. Imports its parents, as starting it does."""
    searched = f"sought the module {name} on this interpreter's path, which begins with {sys.path[0]!r}"
    try:
        spec = None if name.startswith(".") else importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            name += ".__main__"
            spec = importlib.util.find_spec(name)
            searched += f", and found a package; sought {name} to run it"
    except ModuleNotFoundError as error:
        # A parent that is there and lacks a package of its own is none of our finding.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        spec = None
    return f"{searched}; found nothing" if spec is None else None


def _run(args: argparse.Namespace) -> int:
    mode = args.mode or mode_from_environment() or "invariant"
    target = args.command[0]
    if target != "-m" and not Path(target).exists():
        print(f"sought the script {target}, found nothing in {Path.cwd()}", file=sys.stderr)
        return 2
    arm(mode)
    sys.argv = args.command
    if target == "-m":
        sys.argv = args.command[1:]
        if (absent := _absent_module(args.command[1])) is not None:
            print(absent, file=sys.stderr)
            return 2
        runpy.run_module(args.command[1], run_name="__main__", alter_sys=True)
    else:
        # Python does for a script what it did for `-m`: its folder comes first, unless -P or -I says otherwise.
        if not getattr(sys.flags, "safe_path", sys.flags.isolated):
            sys.path[0] = str(Path(target).resolve().parent)
        runpy.run_path(target, run_name="__main__")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m patches", description="The patch layer of deterministic-rocm."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    status = commands.add_parser(
        "status", help="every override: what is installed, and its state in this process"
    )
    status.add_argument("--json", action="store_true")
    status.set_defaults(call=_status)
    check = commands.add_parser(
        "check",
        help="is the installed (or unpacked) upstream what was reviewed? exit 1 if not, 2 if there is none",
    )
    check.add_argument("ids", nargs="*", metavar="ID")
    where = check.add_mutually_exclusive_group()
    where.add_argument("--tree", type=Path, help="folder that holds the packages, instead of sys.path")
    where.add_argument(
        "--load", action="store_true", help="import the installed packages whose functions are compiled"
    )
    check.add_argument("--json", action="store_true")
    check.set_defaults(call=_check)
    pin = commands.add_parser("pin", help="accept the code that is there, after review")
    pin.add_argument("ids", nargs="*", metavar="ID")
    pin.add_argument("--tree", type=Path, help="folder that holds the packages, instead of sys.path")
    pin.add_argument("--version", help="release, where no .dist-info lies beside the package")
    pin.set_defaults(call=_pin)
    explain = commands.add_parser("explain", help="the argument for one override")
    explain.add_argument("id", metavar="ID")
    explain.set_defaults(call=_explain)
    enable = commands.add_parser(
        "enable", help="let --deterministic-rocm work on every command line from here on"
    )
    enable.set_defaults(call=_enable)
    disable = commands.add_parser("disable", help="undo enable")
    disable.set_defaults(call=_disable)
    run = commands.add_parser(
        "run", help="run a script, or `-m module`, armed: python -m patches run train.py …"
    )
    run.add_argument("--mode", choices=MODES)
    run.add_argument("command", nargs="*", metavar="SCRIPT …")
    run.set_defaults(call=_run)
    return parser


def _command_of_run(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Our own words, and those of the command that `run` starts: argparse takes none that begins with an option."""
    if arguments[:1] != ["run"]:
        return arguments, []
    at = 1
    while at < len(arguments) and arguments[at].startswith("-") and not arguments[at].startswith("-m"):
        at += 2 if arguments[at] == "--mode" else 1
    own, command = arguments[:at], arguments[at:]
    if command and command[0].startswith("-m") and command[0] != "-m":
        command[:1] = ["-m", command[0].removeprefix("-m")]
    return own, command


def main(arguments: list[str] | None = None) -> int:
    """Entry point; errors of the patch layer end with their sentence and status 2."""
    parser = _parser()
    own, command = _command_of_run(sys.argv[1:] if arguments is None else arguments)
    args = parser.parse_args(own)
    if own[0] == "run":
        args.command = command
        if command in ([], ["-m"]):
            parser.error("run: name a script, or -m and a module")
    tree = getattr(args, "tree", None)
    if tree is not None and not tree.is_dir():
        parser.error(f"--tree {tree}: no such folder")
    try:
        return int(args.call(args))
    except OverrideError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
