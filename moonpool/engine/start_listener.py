"""Who is told how the start of an engine goes on."""

from typing import Protocol


class StartListener(Protocol):
    """Is told how an engine's start goes on."""

    def starting(self, what: str) -> None:
        """What the start does now."""
        ...

    def loading(self, stage: int, layers: int, of: int) -> None:
        """A stage has loaded this many layers."""
        ...


class NoListener:
    """A start without a listener."""

    def starting(self, what: str) -> None:
        """Ignored."""

    def loading(self, stage: int, layers: int, of: int) -> None:
        """Ignored."""


NO_LISTENER = NoListener()
