#!/usr/bin/env bash
# Megatron-LM's pretrain_gpt.py under torchrun, deterministic:
#   MEGATRON_PATH=/path/to/Megatron-LM bash scripts/pretrain_gpt.sh --tensor-model-parallel-size 2 …
# Every argument goes to pretrain_gpt.py. DETERMINISTIC_ROCM chooses the mode (default invariant), TORCHRUN_ARGS what
# torchrun gets (default: one process a visible GPU). The run counts only if the gate wrote its ledger.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
mode=${DETERMINISTIC_ROCM:-invariant}
ledger=${DETERMINISTIC_ROCM_LEDGER:-$PWD/determinism-ledger.json}
entry=${MEGATRON_PATH:?set MEGATRON_PATH to a Megatron-LM checkout}/pretrain_gpt.py

[ -f "$entry" ] || {
    echo "sought $entry, found no such file; set MEGATRON_PATH to a Megatron-LM checkout" >&2
    exit 2
}
before=$(stat -c %Y "$ledger" 2>/dev/null || echo none)
export PYTHONPATH="$MEGATRON_PATH:$root${PYTHONPATH:+:$PYTHONPATH}" DETERMINISTIC_ROCM_LEDGER=$ledger
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
read -ra launcher <<<"${TORCHRUN_ARGS:---nproc-per-node gpu}"

status=0
python3 -m torch.distributed.run "${launcher[@]}" -m patches run --mode "$mode" "$entry" \
    "--deterministic-rocm=$mode" "$@" || status=$?

after=$(stat -c %Y "$ledger" 2>/dev/null || echo none)
if [ "$status" -eq 0 ] && { [ "$after" = none ] || [ "$after" = "$before" ]; }; then
    echo "the run ended well, but sought a ledger written by its gate at $ledger, found ${after/none/none at all}:" \
        "nothing shows that the overrides were active. Do not use its results as deterministic ones." >&2
    exit 3
fi
exit "$status"
