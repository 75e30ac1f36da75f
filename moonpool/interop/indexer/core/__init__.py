"""What an indexer knows, without I/O."""
