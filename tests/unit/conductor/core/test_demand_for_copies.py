"""Which placements of requests count as prompts that ask for a copy of a hot prefix."""

from moonpool.conductor.core.actions import AnnouncePlacement, CallPrefill, CallReserve, StartDecode
from moonpool.conductor.core.events import CompletionReason
from moonpool.conductor.core.replication import ReplicatePrefix

from .world import NO_ROOM, World

KEYS = tuple(bytes([number]) * 32 for number in range(2))


def holding(decode_prompt_tokens: int = 0) -> World:
    """Decode holds the beginning of all prompts, which prefill would have gained from."""
    world = World(prefills=1, decodes=1, decode_prompt_tokens=decode_prompt_tokens, copy_share=0.1)
    world.holds("decode-0", KEYS)
    return world


def test_a_prompt_counts_once_however_often_it_is_placed() -> None:
    world = holding()
    world.arrive(keys=KEYS)
    for room in range(20, 24):
        world.end(world.one(CallReserve), NO_ROOM)
        assert world.open(CallPrefill) == []
        world.report("decode-0", room)
    world.promise(world.one(CallReserve))
    [told] = world.all(AnnouncePlacement)
    assert told.plan.hint is not None
    assert world.all(ReplicatePrefix) == []
    world.finish_all()
    for _ in range(3):
        world.arrive(keys=KEYS)
        world.promise(world.one(CallReserve))
        world.finish_all()  # a prompt that comes while another one is computed loses nothing
    [copy] = world.all(ReplicatePrefix)
    assert (copy.instance, copy.source, copy.keys) == ("prefill-0", "decode-0", KEYS)


def test_a_prompt_that_decode_computes_is_no_reason_for_a_copy() -> None:
    world = holding(decode_prompt_tokens=32)
    for _ in range(4):
        world.arrive(keys=KEYS)
        world.promise(world.one(CallReserve), held=len(KEYS))
        start = world.one(StartDecode)
        world.more(start, 8, CompletionReason.LENGTH, known=True)
        world.end(start)
    assert [(told.plan.at_decode, told.plan.hint is None) for told in world.all(AnnouncePlacement)] == 4 * [
        (True, False)
    ]
    assert world.all(ReplicatePrefix) == []
    world.finish_all()
