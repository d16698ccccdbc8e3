"""What the documents list is what the code holds: refusals, environment variables, kernels, changes."""

import re

import pytest
from tree import ROOT, sources

from megatron_plugins.arguments import ARGUMENT_RULES
from megatron_plugins.env_contract import MISSPELLED, VARIABLES
from megatron_plugins.refusals import RULES
from patches.ledger import APPLIED, ARMED, KNOWN_BIASED, NOT_REQUIRED, REFUSED, VERIFIED
from patches.report import NOT_ARMED


def document(name):
    return (ROOT / "docs" / name).read_text()


@pytest.mark.parametrize("rule", [rule.rule for rule in (*RULES, *ARGUMENT_RULES)])
def test_every_refusal_is_in_the_limits(rule):
    assert f"| {rule} |" in document("limits.md")


def test_the_limits_list_no_refusal_that_the_code_does_not_make():
    rows = [line for line in document("limits.md").splitlines() if line.startswith("| ")]
    assert len(rows) - 1 == len(RULES) + len(ARGUMENT_RULES)


@pytest.mark.parametrize("name", [*(variable.name for variable in VARIABLES), *MISSPELLED])
def test_every_variable_of_the_environment_contract_is_in_the_operators_guide(name):
    assert f"| `{name}` |" in document("operators.md")


def test_every_variable_of_ours_that_code_reads_is_in_the_table_of_the_operators_guide():
    read = {
        name
        for path in sources("patches", "te_overrides", "megatron_plugins", "scripts")
        for name in re.findall(r"\bDETERMINISTIC_ROCM(?:_[A-Z]+)*\b", path.read_text())
    }
    for script in (ROOT / "scripts").glob("*.sh"):
        read |= set(
            re.findall(
                r"\$\{(DETERMINISTIC_ROCM(?:_[A-Z]+)*|MEGATRON_PATH|TORCHRUN_ARGS)\b", script.read_text()
            )
        )
    table = document("operators.md").split("## Our variables")[1].split("\n## ")[0]
    listed = set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))
    assert {"DETERMINISTIC_ROCM", "MEGATRON_PATH"} <= read
    assert (read - listed, listed - read) == (set(), set()), "read and not listed; listed and not read"


def test_the_page_of_states_knows_every_state():
    states = {ARMED, APPLIED, VERIFIED, NOT_REQUIRED, KNOWN_BIASED, REFUSED, NOT_ARMED}
    listed = set(
        re.findall(r"^\| `([A-Z_]+)` \|", document("operators.md").split("## Our variables")[0], re.MULTILINE)
    )
    assert states - listed == set()
    assert states - set(re.findall(r"`([A-Z_]+)`", document("patch-layer.md"))) == set()


def test_every_kernel_folder_is_in_the_architecture():
    kernels = ROOT / "te_overrides" / "kernels"
    folders = {path.parent.relative_to(kernels).parts[0] for path in kernels.glob("*/*.py")}
    named = set(re.findall(r"^\| `(\w+)` \|", document("architecture.md"), re.MULTILINE))
    assert folders - named == set()


def test_every_change_answers_the_first_question_first():
    changes = sorted((ROOT / "docs" / "changes").glob("[0-9]*.md"))
    assert changes
    for change in changes:
        assert re.match(r"\*\*Do bits change\?\*\* (no|yes: )", change.read_text()), change.name


def test_every_page_is_in_the_index():
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert pages - set(re.findall(r"\]\(([\w.-]+\.md)\)", document("index.md"))) == set()
