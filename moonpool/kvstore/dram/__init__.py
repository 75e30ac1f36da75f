"""The DRAM tier."""
