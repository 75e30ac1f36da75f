"""A simple model of an engine's prefix cache, which publishes what it does as vLLM does."""

import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

KINDS = ("full_attention", "sliding_window")
WINDOW = 2
"""Blocks of a prefix that the group with the window must hold."""


@dataclass
class ModelEngine:
    """Blocks by hash, the least recently used evicted first.

    Attributes:
        capacity: blocks of each group.
        groups: 1 = full attention alone; 2 = a second group with a window.
        maps: events are maps, else arrays.
        digests: hashes are bytes, else numbers.
    """

    block_size: int = 4
    capacity: int = 12
    groups: int = 1
    maps: bool = True
    digests: bool = False
    buffer: int = 1000
    time: float = 0.0
    number: int = 0
    events: list[Any] = field(default_factory=list)
    log: deque[tuple[int, list[Any]]] = field(default_factory=deque)
    held: list[dict[int | bytes, None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.held = [{} for _ in range(self.groups)]

    def restart(self) -> None:
        """Another engine at the same place."""
        self.number, self.events, self.held = 0, [], [{} for _ in range(self.groups)]
        self.log.clear()

    def hashes(self, tokens: Sequence[int], salt: str = "", lora: str = "") -> list[int | bytes]:
        found: list[int | bytes] = []
        digest = b""
        for at in range(0, len(tokens) - self.block_size + 1, self.block_size):
            block = repr((tuple(tokens[at : at + self.block_size]), salt if at == 0 else "", lora)).encode()
            digest = hashlib.sha256(digest + block).digest()
            found.append(digest if self.digests else int.from_bytes(digest[:8], "big"))
        return found

    def hit(self, tokens: Sequence[int], salt: str = "", lora: str = "") -> int:
        """Leading blocks that a request would find."""
        hashes, best = self.hashes(tokens, salt, lora), 0
        for blocks in range(1, len(hashes) + 1):
            if hashes[blocks - 1] not in self.held[0]:
                break
            if all(hash_ in held for held in self.held[1:] for hash_ in hashes[max(0, blocks - WINDOW) : blocks]):
                best = blocks
        return best

    def compute(self, tokens: Sequence[int], salt: str = "", lora: str = "") -> None:
        """A request: its full blocks are held afterwards."""
        hashes = self.hashes(tokens, salt, lora)
        for group, held in enumerate(self.held):
            first = next((at for at, hash_ in enumerate(hashes) if hash_ not in held), len(hashes))
            for hash_ in hashes[:first]:
                held[hash_] = held.pop(hash_)
            new = hashes[first:]
            if not new:
                continue
            while len(held) + len(new) > self.capacity:
                self.evict(group, next(iter(held)))
            extra: list[Any] = [[lora] if lora else None for _ in new]
            if salt and first == 0:
                extra[0] = [*(extra[0] or []), salt]
            self.store(group, new, hashes[first - 1] if first else None, tokens[first * self.block_size :], extra, lora)
            held.update(dict.fromkeys(new))

    def store(
        self, group: int, new: list[int | bytes], parent: int | bytes | None, tokens: Sequence[int], extra: list[Any],
        lora: str,
    ) -> None:  # fmt: skip
        fields = {
            "block_hashes": new,
            "parent_block_hash": parent,
            "token_ids": list(tokens[: len(new) * self.block_size]),
            "block_size": self.block_size,
            "lora_id": 1 if lora else None,
            "medium": "GPU",
            "lora_name": lora or None,
            "extra_keys": extra,
            "group_idx": group,
            "kv_cache_spec_kind": KINDS[group],
        }
        self.tell("BlockStored", fields)

    def evict(self, group: int, block: int | bytes) -> None:
        del self.held[group][block]
        self.tell("BlockRemoved", {"block_hashes": [block], "medium": "GPU", "group_idx": group})

    def clear(self) -> None:
        for held in self.held:
            held.clear()
        self.tell("AllBlocksCleared", {})

    def tell(self, kind: str, fields: dict[str, Any]) -> None:
        self.events.append({"type": kind, **fields} if self.maps else [kind, *fields.values()])

    def publish(self) -> tuple[int, list[Any]] | None:
        """The batch of a step, if something happened."""
        if not self.events:
            return None
        self.time += 1.0
        batch = self.number, [self.time, self.events, 0]
        self.number, self.events = self.number + 1, []
        self.log.append(batch)
        while len(self.log) > self.buffer:
            self.log.popleft()
        return batch

    def replay(self, start: int) -> list[tuple[int, list[Any]]]:
        return [batch for batch in self.log if batch[0] >= start]
