"""The indexer beside Dynamo's, on fuzzed events of engines: what an engine holds is found, and never more.

Needs Dynamo's library: `pip install --no-deps --target FOLDER ai-dynamo-runtime`, then MOONPOOL_DYNAMO=FOLDER.
MOONPOOL_FUZZ_EVENTS says how many events, 100,000 by default.
"""

import json
import os
import random
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from moonpool.interop.indexer.core.index import Holder, Scope, TieredIndex, block_hashes, number_of, rolling
from moonpool.interop.indexer.core.publishers import Publisher, PublisherCache
from moonpool.interop.kv_events.events import AllBlocksCleared, BlockRemoved, BlockStored

FOLDER = os.environ.get("MOONPOOL_DYNAMO", "")
EVENTS, EVENTS_PER_PROBE = int(os.environ.get("MOONPOOL_FUZZ_EVENTS", "100000")), 16
SIZE, WORKERS, NODES = 4, 6, 3000
LORAS = ("", "", "sql", "chat")
SCOPE = Scope("m", "default", SIZE)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not FOLDER, reason="MOONPOOL_DYNAMO names no folder with ai-dynamo-runtime"),
]


@dataclass(eq=False)
class Node:
    """A block of the chains that engines compute."""

    hash: int
    tokens: list[int]
    own: bytes
    lora: str
    parent: "Node | None" = None
    path: list["Node"] = field(default_factory=list)
    children: list["Node"] = field(default_factory=list)

    def below(self) -> list["Node"]:
        """The block and all behind it."""
        found = [self]
        for node in found:
            found += node.children
        return found


def chains(draw: random.Random, lora_hash: Any) -> list[Node]:
    """A forest of blocks; our own hashes and Dynamo's are equal."""
    nodes: list[Node] = []
    for number in range(1, NODES + 1):
        parent = draw.choice(nodes[-40:]) if nodes and draw.random() < 0.95 else None
        tokens = [draw.randrange(50_000) for _ in range(SIZE)]
        lora = draw.choice(LORAS) if parent is None else parent.lora
        [own] = block_hashes(tokens, SIZE, lora)
        assert [number_of(own)] == lora_hash(tokens, SIZE, None, lora or None)
        node = Node(number, tokens, own, lora, parent)
        node.path = [*(parent.path if parent else ()), node]
        if parent is not None:
            parent.children.append(node)
        nodes.append(node)
    return nodes


def stored(blocks: list[Node]) -> tuple[BlockStored, Any]:
    """The event for us and for Dynamo."""
    parent = blocks[0].parent
    extra = tuple([(block.lora,) if block.lora else () for block in blocks])
    event = BlockStored(
        tuple([block.hash for block in blocks]), parent.hash if parent else None,
        [token for block in blocks for token in block.tokens], SIZE, "GPU", extra, blocks[0].lora,
    )  # fmt: skip
    told = [{"block_hash": block.hash, "tokens_hash": number_of(block.own)} for block in blocks]
    return event, {"stored": {"parent_hash": parent.hash if parent else None, "blocks": told}}


def runs(path: list[Node], held: set[Node]) -> list[list[Node]]:
    """The blocks of a path that an engine lacks, those that follow each other together."""
    found: list[list[Node]] = []
    for node in path:
        if node not in held:
            if not found or found[-1][-1] is not node.parent:
                found.append([])
            found[-1].append(node)
    return found


@pytest.mark.parametrize("any_order", [False, True])
def test_what_engines_hold_is_found_as_dynamo_finds_it_or_better(any_order: bool) -> None:
    """`any_order`: engines evict a block before those behind it, too; Dynamo then loses sight of those."""
    os.environ.setdefault("DYN_LOG", "error")
    sys.path.append(FOLDER)
    from dynamo._core import RadixTree, compute_block_hash_for_seq

    seed = int(os.environ.get("MOONPOOL_FUZZ_SEED", "7"))
    print(f"MOONPOOL_FUZZ_SEED={seed}")
    draw = random.Random(seed)
    nodes, index, tree = chains(draw, compute_block_hash_for_seq), TieredIndex(), RadixTree()
    caches = [PublisherCache(Publisher(Holder(str(at), 0), SCOPE, ""), index) for at in range(WORKERS)]
    held: list[set[Node]] = [set() for _ in range(WORKERS)]
    counts, events = Counter[str](), 0
    while events < EVENTS:
        at = draw.randrange(WORKERS)
        told: list[tuple[Any, Any]] = []
        kind = draw.random()
        if kind < 0.0005:
            told, held[at] = [(AllBlocksCleared(), "cleared")], set()
        elif kind < 0.55 or not held[at]:
            node = draw.choice(nodes)
            told = [stored(run) for run in runs(node.path, held[at])]
            held[at].update(node.path)
        else:
            first = draw.choice(nodes)
            gone = [block for block in ([first] if any_order else first.below()) if block in held[at]]
            held[at].difference_update(gone)
            hashes = [block.hash for block in gone]
            told = [(BlockRemoved(tuple(hashes), "GPU"), {"removed": {"block_hashes": hashes}})] if gone else []
        for ours, theirs in told:
            events += 1
            caches[at].apply(ours)
            message = {"event_id": events, "data": theirs, "dp_rank": 0}
            try:
                tree.apply_event(at, json.dumps(message).encode())
            except RuntimeError:  # the block before was evicted
                counts["refused"] += 1
            if events % EVENTS_PER_PROBE == 0 and told[-1][0] is ours:
                path = draw.choice(nodes).path
                truth = {
                    str(worker): blocks
                    for worker in range(WORKERS)
                    if (blocks := next((n for n, block in enumerate(path) if block not in held[worker]), len(path)))
                }
                own = [block.own for block in path]
                found = index.match(SCOPE, rolling(b"", own))
                assert {name: match.longest // SIZE for name, match in found.items()} == truth
                scores = tree.find_matches([number_of(number) for number in own]).scores
                dynamos = {str(worker): blocks for (worker, _), blocks in scores.items()}
                counts["probes"] += 1
                for name in truth.keys() | dynamos.keys():
                    difference = dynamos.get(name, 0) - truth.get(name, 0)
                    counts["more" if difference > 0 else "less" if difference else "equal"] += 1
    index.check_invariants()
    print(f"{events:,} events, {dict(counts)}: engines of a probe that Dynamo finds equal, with less or with more")
    if not any_order:
        assert {*counts} == {"probes", "equal"}
