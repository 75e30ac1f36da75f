"""Moves KV blocks over a transport: prefill to decode, and engines to and from kvstores."""
