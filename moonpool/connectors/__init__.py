"""Keeps other engines' KV in Moonpool's kvstores: connectors that vLLM and LMCache load (docs/engines.md)."""
