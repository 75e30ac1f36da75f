"""Eviction policies of the DRAM tier; `base` has their contract, `policy` their names."""
