"""KV as bytes: identity, layout, memory, frames, credits and the streams it travels on. Free of torch and numpy."""
