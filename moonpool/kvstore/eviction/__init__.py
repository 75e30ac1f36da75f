"""DRAM eviction: policies (docs/extend/eviction_policy.md), and the tenants whose blocks they spare."""
