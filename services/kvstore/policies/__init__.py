"""Eviction policies, one per module; `services.kvstore.policies.policy` has their contract and their names."""
