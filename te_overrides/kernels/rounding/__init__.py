"""float32 to bf16 and fp16, to nearest even, NaN kept (docs/numbers.md, Rounding)."""
