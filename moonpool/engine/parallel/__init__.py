"""Tensor parallelism: the ranks of a stage, and what they share ([ADR 90](docs/adr/0090-tensor-parallelism.md))."""
