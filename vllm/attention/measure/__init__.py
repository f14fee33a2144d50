"""Measuring attention kernels on the machine at hand; only `vllm bench kernels` comes here."""
