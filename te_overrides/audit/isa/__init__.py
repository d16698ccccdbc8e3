"""What each instruction computes.

`SEMANTICS` names every operation once, with its meaning in numpy; the symbolic engine only uses the names.
`ALU` maps an opcode to the operation, the types of its result and sources, and the order of the sources, so
that instructions that compute the same (`v_fma_f32`, `v_fmac_f32`, one half of `v_pk_fma_f32`) are the same
operation to both engines. Memory, branches and whatever else needs more than its operands are methods of
`te_overrides.audit.machine`.
"""

from te_overrides.audit.isa.table import ALU, SEMANTICS, AluSpec, Semantic

__all__ = ["ALU", "SEMANTICS", "AluSpec", "Semantic"]
