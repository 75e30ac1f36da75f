"""The load generator: prompts and arrivals, senders, loops, and what a load has shown."""
