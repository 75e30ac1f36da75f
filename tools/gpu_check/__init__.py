"""Proves and measures the path of a GPU in one command: `python -m tools.gpu_check --out DIR`."""
