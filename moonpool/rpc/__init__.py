"""gRPC as all services use it: serving, channels, errors, processes."""
