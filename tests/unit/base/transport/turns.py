"""Letting other tasks run, without time passing."""

import asyncio


async def turn(rounds: int = 8) -> None:
    """Lets everything that is ready run."""
    for _ in range(rounds):
        await asyncio.sleep(0)
