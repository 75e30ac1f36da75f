"""What was deleted from the SSD tier stays away, whatever is lost afterwards."""

import random
from pathlib import Path

import pytest

from moonpool.kvstore.ssd.data_folder import Durability
from moonpool.kvstore.ssd.tier import open_tier
from moonpool.kvstore.ssd.write_plan import WritePlan
from tests.unit.kvstore.helpers import RECORD, block_of, keys_of
from tests.unit.kvstore.ssd.power import PowerFiles

KEYS = keys_of(8)


@pytest.mark.parametrize("durability", ["power", "process"])
@pytest.mark.parametrize("seed", range(10))
def test_what_is_deleted_while_it_is_carried_over_stays_away_after_a_loss_of_power_and_of_the_index(
    seed: int, durability: Durability, tmp_path: Path
) -> None:
    """The file that it was carried from goes with its name on the device, before the deletion is over."""
    files = PowerFiles(tmp_path)
    ssd = open_tier([tmp_path], 16 * RECORD, 4 * RECORD, durability=durability, files=[files], map_bytes=1 << 16)

    def do(plan: WritePlan) -> None:
        ssd.commit(plan)
        ssd.committed(plan)

    for at in (0, 4):
        do(ssd.plan([block_of(key) for key in KEYS[at : at + 4]]))
    ssd.forget(KEYS[:3])
    assert ssd.disks[0].space.compact(0.5) == 1  # rewritten for the sake of the one that is left
    plan = ssd.plan([])
    assert [append.key for append in plan.carry] == [KEYS[3]]
    assert ssd.erase(filter(None, [ssd.catalogue.find(KEYS[3])])) == [KEYS[3]]
    do(plan)
    while ssd.disks[0].erasing:
        do(ssd.plan([]))
    ssd.abandon()
    files.lose_power(random.Random(seed))
    files.remove_folder(tmp_path / "index")
    ssd = open_tier([tmp_path], 16 * RECORD, 4 * RECORD, files=[files], map_bytes=1 << 16)
    assert KEYS[3] not in ssd.catalogue
    assert durability == "process" or set(KEYS[4:8]) <= set(ssd.catalogue)
    ssd.abandon()
