"""Moonpool: KVCache-centric serving of large language models. `docs/architecture.md` maps the folders."""
