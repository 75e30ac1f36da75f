"""What every process of Moonpool stands on: contracts, settings, KV identity and movement, transport, RPC. No torch."""
