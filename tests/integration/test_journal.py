"""A real conductor keeps a journal while an instance is killed; `moonpool rerun` decides everything the same way."""

import dataclasses
import signal
import subprocess
import sys
from pathlib import Path

from moonpool.client import Client, SamplingParams
from tests.integration.conftest import small_plan, tokens, with_flags
from tests.integration.stack import CheckedStack

GREEDY = SamplingParams(max_tokens=120, temperature=0.0, ignore_eos=True)


def test_a_conductors_journal_reruns_to_the_same_actions(checkpoint: Path, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    plan = dataclasses.replace(small_plan(checkpoint, tmp_path), decode=2)
    with CheckedStack(with_flags(plan, "conductor", "--journal-dir", str(journal))) as stack:
        with Client(stack.address) as client:
            client.generate(token_ids=tokens(90, "first"), sampling=GREEDY)
            stream = client.stream(token_ids=tokens(70, "second"), sampling=GREEDY)
            seen = 0
            for event in stream:
                if not seen and stream.placement is not None and event.token_ids:
                    stack.services[stream.placement.decode].signal(signal.SIGKILL)
                    killed = stream.placement.decode
                seen += len(event.token_ids)
            assert stream.result is not None
            assert (seen, len(stream.result.placements)) == (120, 2)
            stack.restart(killed)
        stack.check_at_rest()
    command = [sys.executable, "-m", "moonpool.cli.main", "rerun", "--check", str(journal)]
    rerun = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    print(rerun.stdout, rerun.stderr)
    assert rerun.returncode == 0
    assert "all actions equal" in rerun.stdout
