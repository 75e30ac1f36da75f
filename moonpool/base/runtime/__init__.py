"""Runs cores in a service: the asyncio driver and the journal of decisions."""
