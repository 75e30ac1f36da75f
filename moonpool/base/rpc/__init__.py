"""gRPC for all services: serving, channels, errors, processes."""
