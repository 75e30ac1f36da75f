"""Measurements: each prints figures beside a limit or peer measured in the same run."""
