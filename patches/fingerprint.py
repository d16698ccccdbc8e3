"""Is it the code that was reviewed? A hash over the tokens of a function's source.

Tokens, not text: comments, docstrings, blank lines and line breaks inside brackets do not count. Tokens, not an
abstract syntax tree: a dump of the tree changes between Python versions, the tokens of a function do not (f-strings,
which newer tokenizers split, are taken as written). The source is read from the file, decorators included, without
importing it, so that a wheel of another version or a source tree can be checked on any machine.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import io
import sys
import tokenize
from collections.abc import Iterable, Sequence
from pathlib import Path

from patches.target import Target

_LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENCODING, tokenize.ENDMARKER}
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_Statement = _Definition | ast.Assign | ast.AnnAssign


def source_file(module: str, tree: Path | None = None) -> Path | None:
    """The file that defines `module`, found by looking, not by importing.

    Args:
        tree: a folder that holds the top-level package (an unpacked wheel, a checkout); default: every entry of
        sys.path.
    """
    relative = Path(*module.split("."))
    for entry in [tree] if tree is not None else [Path(p or ".") for p in sys.path]:
        for candidate in (entry / relative.with_suffix(".py"), entry / relative / "__init__.py"):
            if candidate.is_file():
                return candidate
    return None


def _definitions(body: list[ast.stmt], name: str) -> list[_Definition]:
    """Every definition of `name` in a scope, also under if/try/with: which one is bound is decided at run time."""
    found: list[_Definition] = []
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            if node.name == name:
                found.append(node)
            continue
        for field in ("body", "orelse", "finalbody"):
            found += _definitions(getattr(node, field, []), name)
        for handler in getattr(node, "handlers", []):
            found += _definitions(handler.body, name)
    return found


def _find(tree: ast.Module, qualname: str) -> list[_Definition]:
    scopes: list[list[ast.stmt]] = [tree.body]
    nodes: list[_Definition] = []
    for part in qualname.split("."):
        nodes = [node for scope in scopes for node in _definitions(scope, part)]
        scopes = [node.body for node in nodes]
    return nodes


def _assignments(body: list[ast.stmt], name: str) -> list[ast.Assign | ast.AnnAssign]:
    """Every statement of a module that assigns `name`, also under if/try/with, not inside functions and classes."""
    found: list[ast.Assign | ast.AnnAssign] = []
    for node in body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                found.append(node)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        for field in ("body", "orelse", "finalbody"):
            found += _assignments(getattr(node, field, []), name)
        for handler in getattr(node, "handlers", []):
            found += _assignments(handler.body, name)
    return found


def _docstring_spans(node: ast.AST) -> set[tuple[int, int]]:
    """Start positions of the docstrings in `node` and in what it defines."""
    spans = set()
    for inner in ast.walk(node):
        if (
            isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
            and ast.get_docstring(inner, False) is not None
        ):
            spans.add((inner.body[0].lineno, inner.body[0].col_offset))
    return spans


def _tokens(source: str, node: _Statement) -> list[str]:
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
    lines = source.splitlines(keepends=True)[first - 1 : node.end_lineno]
    indent = len(lines[0]) - len(lines[0].lstrip())
    # Dedented by hand: textwrap.dedent would also touch the inside of strings.
    text = "".join(line[indent:] if line[:indent].isspace() or not indent else line for line in lines)
    docstrings = {(row - first + 1, column - indent) for row, column in _docstring_spans(node)}
    out: list[str] = []
    f_string: tuple[int, tuple[int, int]] | None = None
    text_lines = text.splitlines(keepends=True)
    starts = getattr(tokenize, "FSTRING_START", None)
    ends = getattr(tokenize, "FSTRING_END", None)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if starts is not None and token.type == starts:
            f_string = (f_string[0] + 1, f_string[1]) if f_string else (1, token.start)
            continue
        if f_string is not None:
            if token.type == ends:
                depth, begin = f_string
                f_string = (depth - 1, begin) if depth > 1 else None
                if f_string is None:
                    out.append(_slice(text_lines, begin, token.end))
            continue
        if token.type in _LAYOUT or (token.type == tokenize.STRING and token.start in docstrings):
            continue
        # Depth of indentation is structure; how many spaces make it is layout.
        out.append({tokenize.INDENT: "<indent>", tokenize.DEDENT: "<dedent>"}.get(token.type, token.string))
    return out


def _slice(lines: list[str], start: tuple[int, int], end: tuple[int, int]) -> str:
    if start[0] == end[0]:
        return lines[start[0] - 1][start[1] : end[1]]
    middle = lines[start[0] : end[0] - 1]
    return lines[start[0] - 1][start[1] :] + "".join(middle) + lines[end[0] - 1][: end[1]]


@functools.lru_cache(maxsize=1)
def _parsed(source: str) -> ast.Module:
    """One tree for all targets of a module: an import of TransformerEngine asks eight times in a row."""
    return ast.parse(source)


def of_source(source: str, target: Target, also: Iterable[str] = (), alias: bool = False) -> str | None:
    """Fingerprint of a target in its module's source.

    Args:
        source: text of the defining module.
        also: qualified names of helpers in the same module whose source counts as well.
        alias: the target is a name that the module assigns, not a function that it defines.

    Returns:
        ``source:<32 hex digits>``, or None when the module does not define (or assign) the target.
    """
    tree = _parsed(source)
    digest = hashlib.sha256()
    for qualname in (target.qualname, *also):
        nodes: Sequence[_Statement] = (
            _assignments(tree.body, qualname)
            if alias and qualname == target.qualname
            else _find(tree, qualname)
        )
        if not nodes and qualname == target.qualname:
            return None
        digest.update(f"\0{qualname}\0{len(nodes)}".encode())
        for node in nodes:
            digest.update("\0".join(_tokens(source, node)).encode())
    return f"source:{digest.hexdigest()[:32]}"
