"""Decode: receives prompts' KV and generates tokens in a continuous batch."""
