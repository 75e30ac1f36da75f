"""Keeps other engines' KV in Moonpool's kvstores: a connector for vLLM (`moonpool_kv.vllm`). See docs/engines.md."""
