"""Weights of linear layers: formats in which checkpoints hold them, and products with them."""
