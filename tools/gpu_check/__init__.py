"""Proves and measures the GPU path in one command: `python -m tools.gpu_check --out DIR`."""
