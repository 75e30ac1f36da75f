"""KV as bytes: block keys, layout, frames, slice hashes, the shared pool. Free of torch and numpy."""
