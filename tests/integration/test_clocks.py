"""Every service has a clock of its own, days apart from the others': nothing that is served or told depends on it.

Each runs in a time namespace. So a time that leaves a process and is compared with another one's clock is far off.
"""

import dataclasses
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from moonpool.base.fork_server import Launcher, execute
from moonpool.base.sampling_params import SamplingParams
from moonpool.client import Client
from tests.integration.conftest import BLOCK, small_plan, tokens
from tests.integration.reference import Reference
from tests.integration.stack import CheckedStack

DAY_S = 86_400
AHEAD_DAYS = {"conductor": 3, "conductor-1": 40, "kvstore-0": 11, "prefill-0": 1, "decode-0": 200}
"""Of the machine's clock; behind it there is nothing, as it begins with 0."""
GREEDY = SamplingParams(max_tokens=300, temperature=0.0, ignore_eos=True)
PROBE = ["unshare", "--time", "--monotonic", str(DAY_S), sys.executable, "-c", "import time; print(time.monotonic())"]


def ahead(days: int) -> list[str]:
    """The command that lets another one begin so many days ahead."""
    seconds = str(days * DAY_S)
    return ["unshare", "--time", "--monotonic", seconds, "--boottime", seconds]


class Apart(CheckedStack):
    """Each service lives in a time of its own."""

    def launcher(self, service_id: str) -> Launcher:
        return partial(execute, python=[*ahead(AHEAD_DAYS[service_id]), sys.executable])


@pytest.fixture
def apart(checkpoint: Path, tmp_path: Path) -> Iterator[CheckedStack]:
    try:
        done = subprocess.run(PROBE, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("time namespaces need the unshare command (util-linux)")
    if done.returncode:
        pytest.skip(f"no time namespaces here: {done.stderr.strip()}")
    assert float(done.stdout) > time.monotonic() + DAY_S / 2, "clocks are apart"
    with Apart(dataclasses.replace(small_plan(checkpoint, tmp_path), conductors=2)) as stack:
        yield stack


@pytest.mark.slow
def test_clocks_apart(apart: CheckedStack, reference: Reference) -> None:
    """A prompt, its prefix from the kvstore, a stream that outlives its conductor: every time told is a duration."""
    prompt, began = tokens(6 * BLOCK + 3, "clocks"), time.monotonic()
    with Client(apart.addresses) as client:
        first = client.generate(token_ids=prompt, sampling=GREEDY)
        apart.check_at_rest()
        apart.restart_all(["prefill-0", "decode-0"])
        second = client.generate(token_ids=prompt, sampling=GREEDY)
        story = client.explain(second.request_id)
        took_s = time.monotonic() - began
        stream, killed = client.stream(token_ids=prompt, sampling=GREEDY), False
        for _ in stream:
            if not killed:
                apart.services["conductor"].signal(signal.SIGKILL)
                killed = True
        third = stream.result
    apart.restart("conductor")
    reference.assert_greedy(prompt, first.token_ids)
    assert third is not None
    assert first.token_ids == second.token_ids == third.token_ids
    assert (second.usage.cached_tokens, second.placement.kvstore, third.resumes) == (6 * BLOCK, "kvstore-0", 1)
    for timing in (first.timing, second.timing):
        for told_s in (timing.ttft_s, timing.e2e_s, timing.queue_s, timing.prefill_s):
            assert 0.0 <= told_s < took_s
    assert story.placement is not None
    assert 0.0 < story.placement.predicted_ttft_s < took_s
    times = [*story.timeline.token_s, *(load.end_s for load in (*story.timeline.loads, *story.timeline.chunks))]
    assert all(0.0 <= told_s < took_s for told_s in times)
