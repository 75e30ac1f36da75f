"""KV events in the form of vLLM and SGLang: reading, order, what an engine holds by them, and publishing."""
