"""The prefill core: one instance's requests, chunks, steps, loads, sends and blocks, decided without I/O."""
