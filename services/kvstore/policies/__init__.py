"""Eviction policies of the DRAM tier; `services.kvstore.policies.policy` has their contract and their names."""
