"""Experiments: each is a function that returns a `Result`."""
