"""What moves KV between processes: multiplexed streams, credits, transfers, clients of decode and of the store."""
