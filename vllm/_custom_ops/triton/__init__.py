"""Triton twins of the compiled ops, for CUDA tensors; `table.py` registers them."""
