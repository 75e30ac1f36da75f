from benchmarks.conductor import CHAIN_BLOCKS, STORES, ConductorWorld, Size, chain_keys


def test_a_small_world_is_told_and_asked() -> None:
    world = ConductorWorld(Size(prefills=5, decodes=4, blocks=2 * CHAIN_BLOCKS))
    told = world.tell()
    assert told.blocks == 2 * CHAIN_BLOCKS
    assert told.events > 2 * told.blocks  # each chain wholly at a store, and parts elsewhere
    keys = chain_keys(1)
    for _ in range(5):
        assert world.decide(keys) > 0
    picture = world.cluster
    picture.check_invariants()
    assert len(picture) == 5 + 4 + STORES
    assert (picture.prompts_in_flight, picture.answers_in_flight) == (5, 5)
    assert max(picture.index.lengths(keys).values()) == CHAIN_BLOCKS
