"""Placement policies: how the prefill instance of a request is chosen (docs/extend/placement_policy.md)."""
