"""Transports for KV streams (gRPC, shared memory, TCP), and the streams, sessions and flow control above them."""
