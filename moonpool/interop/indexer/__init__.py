"""What others ask of the index: a KV indexer over HTTP, and KV events in the form of vLLM."""
