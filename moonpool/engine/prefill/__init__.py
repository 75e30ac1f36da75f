"""Prefill: computes prompts' KV, streams KV to decode, and samples first tokens."""
