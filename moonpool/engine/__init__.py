"""Engine processes: torch behind a small local protocol. Import the modules; no name is re-exported here."""
