"""Engine processes: torch behind a small local protocol. Import the modules; nothing is re-exported here."""
