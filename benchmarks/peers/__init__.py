"""Other stores for comparison, all optional: how each is started, and its client."""
