"""What the store holds, and how blocks come and are read; no I/O."""
