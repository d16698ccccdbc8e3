"""Does a registered torch operator still take what a caller of ours passes? Its schema as an ordered prefix.

AITER wraps its operators in Python functions that hide their signature, and calls with positional arguments: an
inserted bool shifts the meaning of everything behind it without an error. The schema that torch holds shows it. A
reviewed schema is accepted if its arguments are the first ones of the schema that is found, in order, with their names
and types and with or without a default as before, and everything behind them has a default; what is returned must be
the same. The value of a default does not count: a caller passes every argument that it had reviewed.

Standard library only: torch is looked up among the modules that are loaded already, since whoever registers operators
has imported it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

from patches.errors import DriftError

PREFIX = "schema:"
_FORM = re.compile(r"(?P<name>[\w:.]+)\((?P<arguments>.*)\) -> (?P<returns>.+)", re.DOTALL)


class Argument(NamedTuple):
    """One argument of a schema; `default` is None where there is none, `keyword` says that it is keyword-only."""

    name: str
    type: str
    default: str | None
    keyword: bool

    @property
    def shape(self) -> tuple[str, str, bool, bool]:
        """What must not change: name, type, whether it has a default, whether it is keyword-only."""
        return self.name, self.type, self.default is not None, self.keyword

    def __str__(self) -> str:
        return f"{self.type} {self.name}" + ("" if self.default is None else f"={self.default}")


class Schema(NamedTuple):
    """A schema taken apart."""

    name: str
    arguments: tuple[Argument, ...]
    returns: str


def parse(text: str) -> Schema:
    """``ns::op(Tensor a, int? b=None, *, bool c=False) -> Tensor`` taken apart.

    Raises:
        DriftError: text of another form.
    """
    match = _FORM.fullmatch(text.strip())
    if match is None:
        raise DriftError(
            f"operator schema {text!r} is not of the form 'namespace::name(arguments) -> returns'"
        )
    arguments, keyword = [], False
    for part in _split(match["arguments"]):
        if part == "*":
            keyword = True
            continue
        declared, equals, default = part.partition("=")
        kind, _, name = declared.strip().rpartition(" ")
        arguments.append(Argument(name, kind, default.strip() if equals else None, keyword))
    return Schema(match["name"], tuple(arguments), match["returns"].strip())


def _split(text: str) -> list[str]:
    """At the commas outside brackets and strings."""
    parts, depth, quoted, start = [], 0, False, 0
    for index, character in enumerate(text):
        if character in "\"'":
            quoted = not quoted
        elif not quoted:
            depth += (character in "([{") - (character in ")]}")
            if character == "," and depth == 0:
                parts.append(text[start:index].strip())
                start = index + 1
    parts.append(text[start:].strip())
    return [part for part in parts if part]


def difference(reviewed: Schema, found: Schema) -> str | None:
    """What keeps `reviewed` from being an ordered prefix of `found`, in words; None if nothing does."""
    for position, want in enumerate(reviewed.arguments):
        if position >= len(found.arguments):
            return f"argument {position} ({want}) is gone"
        got = found.arguments[position]
        if got.shape != want.shape:
            return f"argument {position} was reviewed as ({want}) and is ({got})"
    for position, got in enumerate(found.arguments[len(reviewed.arguments) :], len(reviewed.arguments)):
        if got.default is None:
            return f"argument {position} ({got}) is new and has no default"
    if found.returns != reviewed.returns:
        return f"it returned {reviewed.returns} and returns {found.returns}"
    return None


def registered(operator: str) -> str | None:
    """The schema that torch holds for ``namespace::name[.overload]``; None if torch or the operator is not there."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return None
    namespace, _, rest = operator.partition("::")
    name, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), name, None)
    function = None if packet is None else getattr(packet, overload or "default", None)
    return None if function is None else str(function._schema)


def lock_key(operator: str) -> str:
    """The name under which ``overrides.lock.json`` holds an operator's schemas."""
    return f"operator {operator}"


def require_prefix(operator: str, reviewed: str | Iterable[str], *, who: str = "this code") -> str:
    """Refuse an operator that is not one of those reviewed.

    Args:
        operator: ``namespace::name``.
        reviewed: schema as text, or several, one for every reviewed form.
        who: what calls the operator, for the message.

    Returns:
        The schema that was found.

    Raises:
        DriftError: the operator is not registered, or no reviewed schema is an ordered prefix of its schema.
    """
    known = [reviewed] if isinstance(reviewed, str) else list(reviewed)
    text = registered(operator)
    ways_on = (
        f"Ways on: (1) review what {operator} does now and pin the override; (2) install the release that was "
        "reviewed; (3) run without --deterministic-rocm."
    )
    sought = "; ".join(known) or "a schema, but none was ever reviewed"
    if text is None:
        absent = "no such operator" if "torch" in sys.modules else "no torch in this process: import it first"
        raise DriftError(f"{who} calls the operator {operator}. Sought {sought}. Found {absent}. {ways_on}")
    found = parse(text)
    reasons = [difference(parse(schema), found) for schema in known]
    if not known or all(reasons):
        why = next((reason for reason in reversed(reasons) if reason), "nothing to compare with")
        raise DriftError(
            f"{who} calls the operator {operator}: {why}. Sought {sought}. Found {text}. {ways_on}"
        )
    return text
