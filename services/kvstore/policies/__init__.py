"""Eviction policies, one per module; `services.kvstore.policy` has their contract and their names."""
