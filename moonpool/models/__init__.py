"""Transformer models: weights of a stage, one forward over a packed batch. Needs torch. Import the modules."""
