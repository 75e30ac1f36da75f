"""Prefill: computes the KV of prompts, streams KV to decode, and samples first tokens."""
