"""What a storm's judge must see: engines and gateways that are wrong on purpose."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

import pytest

from moonpool.base.kv.media import media_digest
from moonpool.base.pictures.file_process import decode
from tests.world.cluster import Simulation
from tests.world.faults import FaultPlan
from tests.world.process import in_new_process
from tests.world.storm import KEPT, Storm, StormPlan, make_checkpoint

SECONDS = 5.0


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("PIL")
    return make_checkpoint(tmp_path_factory.mktemp("model") / "tiny", pictures=True)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


async def broken(
    simulation: Simulation, checkpoint: Path, owner: Any, name: str, wrong: Any, **changes: Any
) -> list[str]:
    """What is broken in a calm storm in which `name` of `owner` is `wrong`."""
    logging.disable(logging.ERROR)
    plan = StormPlan(2, SECONDS, computes=True, faults=FaultPlan(gap_s=1e9), rerun=False, **changes)
    with pytest.MonkeyPatch.context() as patches, tempfile.TemporaryDirectory() as folder:
        storm = Storm(simulation, plan, Path(folder), checkpoint)
        KEPT.append(storm)
        patches.setattr(owner, name, wrong)
        await storm.run()
    return storm.bad


def wrong_tokens(bad: list[str]) -> list[str]:
    return [fault for fault in bad if "should be" in fault]


@pytest.mark.slow
@pytest.mark.timeout(900)
@in_new_process
async def test_pictures_upside_down_are_seen(simulation: Simulation, pictures: Path) -> None:
    """Their rows are as many, and of right sizes."""
    from moonpool.engine.models import pictures as encoders  # torch takes seconds to import

    bad = await broken(
        simulation, pictures, encoders, "decode", lambda content: decode(content).rotate(180), pictures=True
    )
    assert wrong_tokens(bad), bad


@pytest.mark.slow
@pytest.mark.timeout(900)
@in_new_process
async def test_a_digest_of_the_size_alone_is_seen(simulation: Simulation, pictures: Path) -> None:
    """The KV of another picture is found by it."""
    from moonpool.base.pictures import rule

    def wrong(content: bytes, settings: tuple[object, ...]) -> bytes:
        return media_digest(b"", settings[2:])

    bad = await broken(simulation, pictures, rule, "media_digest", wrong, pictures=True)
    assert wrong_tokens(bad) or any("are cached" in fault for fault in bad), bad


@pytest.mark.slow
@pytest.mark.timeout(900)
@in_new_process
async def test_a_sum_that_counts_a_rank_twice_is_seen(simulation: Simulation, texts: Path) -> None:
    from moonpool.engine.parallel.ranks import Ranks

    right = Ranks.sum
    bad = await broken(simulation, texts, Ranks, "sum", lambda self, part: right(self, part) + part, ranks=2)
    assert wrong_tokens(bad), bad


@pytest.mark.slow
@pytest.mark.timeout(900)
@in_new_process
async def test_an_answer_of_another_line_of_a_batch_is_seen(simulation: Simulation, texts: Path) -> None:
    from moonpool.gateway.batches.in_process import InProcessClient, InProcessResponse

    right, before = InProcessClient.post, dict[str, bytes]()

    async def wrong(self: InProcessClient, path: str, body: bytes, tenant: str) -> InProcessResponse:
        asked, before[path] = before.get(path, body), body
        return await right(self, path, asked, tenant)

    bad = await broken(simulation, texts, InProcessClient, "post", wrong)
    assert wrong_tokens(bad) or any(" is not " in fault for fault in bad), bad
