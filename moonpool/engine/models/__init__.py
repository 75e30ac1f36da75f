"""Transformer models: a stage's weights, one forward over a packed batch. Needs torch. Import the modules."""
