#!/usr/bin/env bash
# Runs every check of this repository: ruff, mypy, then the tests. Arguments are passed to pytest:
#   bash scripts/test.sh                           everything this machine can run, about a quarter of an hour on two cores
#   bash scripts/test.sh tests/unit -k rounding    some of it
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
cd "$ROOT"

failed=()
check() {
    local name=$1
    shift
    if "$@"; then
        printf 'checks: %s ok\n' "$name"
    else
        printf 'checks: %s FAILED\n' "$name"
        failed+=("$name")
    fi
}
check 'ruff check' "$VENV_PYTHON" -m ruff check --quiet .
check 'ruff format' "$VENV_PYTHON" -m ruff format --check --quiet .
check 'local bans' "$VENV_PYTHON" scripts/local_bans.py
check 'mypy' "$VENV_PYTHON" -m mypy

# Two workers for two cores. Files whose tests share something costly stay on one worker (tests/conftest.py).
status=0
"$VENV_PYTHON" -m pytest -n 2 --dist loadgroup "$@" || status=$?
if [ "${#failed[@]}" -gt 0 ]; then
    printf 'checks: FAILED before pytest: %s\n' "${failed[*]}"
    [ "$status" -ne 0 ] || status=1
fi
exit "$status"
