"""Prefill: computes prompts' KV, streams it to decode, and samples first tokens."""
