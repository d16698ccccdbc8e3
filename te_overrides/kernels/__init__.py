"""One folder an operation: reference.py is the contract in plain torch, kernel.py the Triton implementation."""
