"""What drives cores in a service: an asyncio driver, a journal of what happened, and its rerun."""
