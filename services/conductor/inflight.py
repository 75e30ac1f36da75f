"""What the conductor has placed on an instance and has not ended yet.

Load reports lag by a heartbeat; without these counters a burst would go to one instance. Times are arguments, in
seconds of a monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class PrefillsInFlight:
    """Prompts placed on one prefill instance whose first token has not come, in order of placement."""

    predicted_s: dict[str, float] = field(default_factory=dict)
    _head_since: float = 0.0

    def __len__(self) -> int:
        """Prompts waiting for their first token."""
        return len(self.predicted_s)

    def begin(self, request_id: str, predicted_s: float, now: float) -> None:
        """Note a prompt that is predicted to keep the instance busy for `predicted_s`."""
        assert request_id not in self.predicted_s, f"{request_id} is in flight already"
        if not self.predicted_s:
            self._head_since = now
        self.predicted_s[request_id] = predicted_s

    def end(self, request_id: str, now: float) -> None:
        """Note that a prompt has its first token or was cancelled; unknown ids are fine."""
        if request_id not in self.predicted_s:
            return
        if next(iter(self.predicted_s)) == request_id:
            self._head_since = now
        del self.predicted_s[request_id]

    def queue_seconds(self, now: float) -> float:
        """Predicted seconds until all of them are done; the time since the first one began is subtracted."""
        if not self.predicted_s:
            return 0.0
        head = next(iter(self.predicted_s.values()))
        elapsed = min(max(now - self._head_since, 0.0), head)
        return sum(self.predicted_s.values()) - elapsed


@dataclass(slots=True)
class DecodesInFlight:
    """Sequences placed on one decode instance that have not ended."""

    context_tokens: dict[str, int] = field(default_factory=dict)
    unreported_blocks: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        """Sequences that have not ended."""
        return len(self.context_tokens)

    def begin(self, request_id: str, context_tokens: int, blocks: int) -> None:
        """Note a sequence that was promised `blocks` blocks."""
        assert request_id not in self.context_tokens, f"{request_id} is in flight already"
        self.context_tokens[request_id] = context_tokens
        self.unreported_blocks[request_id] = blocks

    def end(self, request_id: str) -> None:
        """The sequence has ended; unknown ids are fine."""
        self.context_tokens.pop(request_id, None)
        self.unreported_blocks.pop(request_id, None)

    def reported(self) -> None:
        """Note a load report: it includes everything promised so far."""
        self.unreported_blocks.clear()

    def total_context_tokens(self) -> int:
        """Prompt tokens of all of them (what they generated since is in the instance's own reports)."""
        return sum(self.context_tokens.values())

    def total_unreported_blocks(self) -> int:
        """Blocks promised since the last report."""
        return sum(self.unreported_blocks.values())
