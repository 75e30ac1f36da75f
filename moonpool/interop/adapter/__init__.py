"""The adapter: joins an engine that is not Moonpool's, such as vLLM, to the cluster."""
