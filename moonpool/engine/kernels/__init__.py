"""Paged attention and what goes with it: reference, plain torch, native CPU, Triton; one dispatch."""
