"""Ways for a KV stream's messages beside gRPC: offers, regions, framing, both ends (docs/lanes.md)."""
