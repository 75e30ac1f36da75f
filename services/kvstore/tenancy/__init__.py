"""Tenants, quotas and pins."""
