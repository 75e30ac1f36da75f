"""Transports for KV streams (gRPC, shared memory, TCP), and the streams, channels and flow control above them."""
