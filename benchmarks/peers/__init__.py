"""Other stores beside ours, benchmark-only and all optional: how each is started, and the client that is measured."""
