"""The parts of which a prompt's time at its instance is foreseen to consist."""

from typing import NamedTuple


class Parts(NamedTuple):
    """Seconds of each part; or the factors by which each is corrected, or was.

    Attributes:
        queue: waiting for the prompts before it.
        load: of loading its prefix, what computing does not hide.
        fixed: of computing, what each step takes whatever is in it: a prompt of few tokens is mostly this.
        growing: of computing, what grows with tokens.
        later: what prompts that come later take of the step in which it ends. Its factor is their share of a full step.
    """

    queue: float = 1.0
    load: float = 1.0
    fixed: float = 1.0
    growing: float = 1.0
    later: float = 1.0

    def slowed(self, by: float) -> "Parts":
        """Each so many times as long."""
        return Parts(*[part * by for part in self])

    def computed(self, by: float) -> "Parts":
        """Loading and computing so many times as long."""
        return self._replace(load=self.load * by, fixed=self.fixed * by, growing=self.growing * by)
