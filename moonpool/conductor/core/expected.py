"""Prompts that are expected: of sessions whose return is foreseen, and of batches that clients announce."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from moonpool.base.frozen import frozen
from moonpool.base.kv.keys import KEY_BYTES
from moonpool.base.scheduling.sessions import SessionHint, SessionTurn
from moonpool.base.scheduling.state_machine import digest_of

PromptName = tuple[str, str]
"""Tenant, and session or batch."""
MEMORY_LEAD_S = 10.0
"""Seconds before a prompt is expected at which its blocks are brought from SSD into a kvstore's memory."""
INSTANCE_LEAD_S = 3.0
"""Seconds before a prompt is expected at which its blocks are brought into a prefill instance."""
MAX_EXPECTED = 16_384
"""Prompts that are expected at once. Of more, the prompt noted longest ago is dropped."""
MAX_KEY_BYTES = 64 << 20
"""Bytes of the keys of these prompts' chains."""


class ExpectedPrompts:
    """All prompts that a conductor expects, each with the time of the next order for its blocks."""

    def __init__(self) -> None:
        self._prompts: OrderedDict[PromptName, ExpectedPrompt] = OrderedDict()
        self._due: list[tuple[float, PromptName]] = []  # `due_at` of prompts; outdated ones, too
        self._key_bytes = 0

    def __len__(self) -> int:
        return len(self._prompts)

    def put(self, name: PromptName, prompt: ExpectedPrompt, now: float) -> None:
        """Expects a prompt, in place of an earlier one of this name."""
        self.drop(name)
        self._prompts[name] = prompt
        self._key_bytes += len(prompt.keys)
        self._await(name, prompt, max(now, prompt.at - MEMORY_LEAD_S))
        while len(self._prompts) > MAX_EXPECTED or self._key_bytes > MAX_KEY_BYTES:
            self.drop(next(iter(self._prompts)))

    def drop(self, name: PromptName) -> ExpectedPrompt | None:
        """Expects a prompt no longer: it has come, or will not. Return the prompt if it was expected."""
        prompt = self._prompts.pop(name, None)
        if prompt is not None:
            self._key_bytes -= len(prompt.keys)
        return prompt

    def due(self) -> float | None:
        """When the next order is due; None = no prompt is expected."""
        while self._due:
            at, name = self._due[0]
            prompt = self._prompts.get(name)
            if prompt is not None and prompt.due_at == at:
                return at
            heappop(self._due)
        return None

    def coming(self, now: float) -> Iterator[tuple[PromptName, ExpectedPrompt]]:
        """Return the prompts for whose blocks an order is due: first for memory, then for an instance (`in_memory`)."""
        while (at := self.due()) is not None and at <= now:
            name = heappop(self._due)[1]
            prompt = self._prompts[name]
            yield name, prompt
            if prompt.in_memory:
                self.drop(name)
            else:
                prompt.in_memory = True
                self._await(name, prompt, max(now, prompt.at - INSTANCE_LEAD_S))

    def _await(self, name: PromptName, prompt: ExpectedPrompt, due_at: float) -> None:
        """Note when an order is due. Outdated notes are dropped before most are outdated."""
        prompt.due_at = due_at
        heappush(self._due, (due_at, name))
        if len(self._due) > 2 * len(self._prompts):
            self._due = [(prompt.due_at, name) for name, prompt in self._prompts.items()]
            heapify(self._due)

    def check_invariants(self) -> None:
        """Assert that what is remembered is bounded, and that each prompt has an order to come."""
        assert len(self._due) <= 2 * MAX_EXPECTED, "outdated notes stay"
        assert self._key_bytes == sum(len(prompt.keys) for prompt in self._prompts.values()) <= MAX_KEY_BYTES
        assert {(prompt.due_at, name) for name, prompt in self._prompts.items()} <= set(self._due)

    def digest(self) -> bytes:
        return digest_of(self._prompts, self._due)


@dataclass(slots=True)
class ExpectedPrompt:
    """A prompt that will come.

    Attributes:
        keys: of its known full blocks, concatenated.
        stores: kvstores that hold them.
        turn: what the client has said of the session.
        hint, told_at: what these kvstores were told last, and when.
        at: when the prompt is expected, seconds.
        due_at: when the next order is due.
        in_memory: the blocks were ordered into memory, or are there.
    """

    keys: bytes
    stores: tuple[str, ...]
    turn: SessionTurn
    hint: SessionHint
    told_at: float
    at: float
    due_at: float = 0.0
    in_memory: bool = False

    @property
    def chain(self) -> tuple[bytes, ...]:
        """The keys, one by one."""
        return tuple([self.keys[at : at + KEY_BYTES] for at in range(0, len(self.keys), KEY_BYTES)])


@frozen
class TellSession:
    """Tell a kvstore what is known of a session, and which blocks it shall bring from SSD into memory.

    `prefetch`: keys of the chain, from its beginning; () = none, and those of an earlier order are not wanted any more.
    """

    instance: str
    hint: SessionHint
    prefetch: tuple[bytes, ...] = ()


def joined(keys: Sequence[bytes]) -> bytes:
    """Return the keys as `ExpectedPrompt.keys` holds them."""
    return b"".join(keys)
