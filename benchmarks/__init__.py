"""Measurements: each prints its figures beside a limit or peer measured in the same run."""
