"""Which engines a local stack gets, why, and how they hold their weights."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from moonpool.base.bundled import model_dir
from moonpool.base.errors import ConfigError
from moonpool.cli import engine_plan, serve
from moonpool.cli.engine_plan import decide_engines, tell_memory
from moonpool.cli.main import app
from moonpool.cli.options import Engines
from moonpool.cli.progress import PlainProgress
from moonpool.cli.stack import BOTH_ROLES, LocalStack, StackPlan

EACH = 540 << 20
"""Bytes of an engine of the bundled model, about: program, and 256 MiB of KV."""
GPU = ["--set", "device=cuda:0"]


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StackPlan:
    """A plan nobody has decided on, on a machine with memory and with large pages for files."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(engine_plan, "gives_large_pages", lambda folder: True)
    monkeypatch.setattr(engine_plan, "available_bytes", lambda: 100 * EACH)
    return StackPlan(str(model_dir()), tmp_path, engines="auto")


@pytest.mark.parametrize(
    ("changes", "one_client", "engines", "why"),
    [
        ({}, True, "one", "a single client is as fast; --engines split has two"),
        ({}, False, "split", "answers of several clients are not held up by prompts; --engines one has"),
        ({"engine": "emulated:h100-llama3-8b"}, True, "split", "emulated"),
        ({"prefill": 2}, True, "split", r"2 \+ 1 instances are asked for"),
        ({"decode": 3}, True, "split", r"1 \+ 3 instances are asked for"),
        ({"pipeline_parallel_size": 2}, True, "split", "prefill has stages"),
        ({"swap_roles": True}, True, "split", "instances change their roles"),
        ({"extra": {"conductor": ["--set", "swap_roles=true"]}}, True, "split", "instances change their roles"),
        ({"extra": {"prefill": GPU, "decode": GPU}}, True, "split", "on a GPU"),
        ({"extra": {"decode": GPU}}, True, "split", "prefill has settings of its own, device"),
        ({"extra": {"prefill": ["--set", "max_queue=9"]}}, True, "split", "settings of its own, max_queue=9"),
        ({"extra": {"decode": ["--set", "max_num_seqs=4"]}}, True, "one", "a single client"),
        ({"extra": {"prefill": ["--set", "dtype=x"], "decode": ["--set", "dtype=x"]}}, True, "one", "a single client"),
    ],
)
def test_auto_chooses_by_device_settings_and_use(
    plan: StackPlan, changes: Mapping[str, Any], one_client: bool, engines: Engines, why: str
) -> None:
    decided, said = decide_engines(replace(plan, **changes), one_client=one_client)
    assert decided == replace(plan, **changes, engines=engines)
    assert re.search(why, said), said


def test_the_users_decision_stands_without_a_word(plan: StackPlan) -> None:
    both: tuple[Engines, ...] = ("one", "split")
    for engines in both:
        asked = replace(plan, engines=engines)
        assert decide_engines(asked, one_client=engines == "split") == (asked, "")


@pytest.mark.parametrize("extra", [{"prefill": ["--set", "max_queue=9"]}, {"decode": GPU}])
def test_settings_of_prefill_need_a_prefill_instance(plan: StackPlan, extra: dict[str, list[str]]) -> None:
    with pytest.raises(ConfigError, match="engines: one engine has no prefill instance, which has settings of its own"):
        decide_engines(replace(plan, engines="one", extra=extra), one_client=False)


def test_one_engine_where_two_do_not_fit(plan: StackPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that share their weights need less; a checkpoint that cannot be read is the services' to refuse."""
    memory = engine_plan.engine_memory(plan)
    assert memory is not None
    assert memory.held.weights > 1 << 20
    monkeypatch.setattr(engine_plan, "available_bytes", lambda: None)
    assert decide_engines(plan, one_client=False)[0].engines == "split"
    least = 2 * memory.held.idle - memory.held.weights
    for free, shared, engines in ((least, True, "split"), (least, False, "one"), (least - 1, True, "one")):
        monkeypatch.setattr(engine_plan, "available_bytes", lambda amount=free: amount)
        monkeypatch.setattr(engine_plan, "gives_large_pages", lambda folder, large=shared: large)
        decided, said = decide_engines(plan, one_client=False)
        assert decided.engines == engines
        assert ("two do not fit into" in said) == (engines == "one")
    assert decide_engines(replace(plan, model="/none"), one_client=False)[0].engines == "split"


def told(plan: StackPlan) -> tuple[StackPlan, str]:
    said: list[str] = []
    found = tell_memory(plan, PlainProgress(said.append))
    return found, said[-1] if said else ""


def test_engines_share_their_weights(plan: StackPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    split = replace(plan, engines="split", extra={"decode": ["--max-num-seqs", "4"]})
    assert told(split)[0] == split, "small weights are not worth a file"
    monkeypatch.setattr(engine_plan, "LEAST_MAPPED_BYTES", 1 << 20)
    found, said = told(split)
    assert found.extra == {
        "prefill": ["--set", "mmap_weights=on"],
        "decode": ["--max-num-seqs", "4", "--set", "mmap_weights=on"],
    }
    assert "engines hold the weights once" in said
    assert "the disk" not in said
    for kept in (
        replace(split, extra={"prefill": ["--set", "mmap_weights=off"]}),
        replace(split, extra={"prefill": GPU, "decode": GPU}),
    ):
        assert told(kept)[0] == kept
    for alone in (replace(split, engines="one"), replace(split, pipeline_parallel_size=2)):
        found, said = told(alone)
        assert found != alone, "later starts find the file"
        assert "engines hold the weights once" not in said
    assert "engines hold the weights once" in told(replace(split, pipeline_parallel_size=2, prefill=2))[1]
    monkeypatch.setattr(engine_plan, "gives_large_pages", lambda folder: False)
    assert told(split)[0] == split, "small pages cost more time than the memory is worth"


def test_a_folder_that_cannot_be_used_is_not_asked_for(plan: StackPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Path) -> bool:
        raise PermissionError(folder)

    monkeypatch.setattr(engine_plan, "LEAST_MAPPED_BYTES", 1 << 20)
    monkeypatch.setattr(engine_plan, "gives_large_pages", refuse)
    split = replace(plan, engines="split")
    assert told(split)[0] == split


def test_engines_map_their_weights_where_memory_is_short(plan: StackPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = replace(plan, engines="split", prefill=2, extra={"decode": ["--max-num-seqs", "4"]})
    refused = replace(plan, extra={"prefill": ["--set", "mmap_weights=off"]})
    for free in (None, 4 * EACH):
        monkeypatch.setattr(engine_plan, "available_bytes", lambda amount=free: amount)
        found, said = told(plan)
        assert found == plan
        assert "mapped" not in said
    monkeypatch.setattr(engine_plan, "available_bytes", lambda: 2 * EACH)
    assert told(refused)[0] == refused
    found, said = told(plan)
    assert found.extra["prefill"] == ["--set", "mmap_weights=on"]
    assert found.extra["decode"] == ["--max-num-seqs", "4", "--set", "mmap_weights=on"]
    assert " are free: weights are mapped from a file" in said
    one, said = told(replace(plan, engines="one", prefill=1, extra={}))
    assert one.extra == {}
    monkeypatch.setattr(engine_plan, "available_bytes", lambda: EACH // 2)
    one, said = told(replace(plan, engines="one", prefill=1, extra={}))
    assert one.extra == {"decode": ["--set", "mmap_weights=on"]}


def test_a_stack_of_one_engine_has_no_prefill_instance(plan: StackPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, str]] = []
    two = [("prefill", "prefill-0"), ("decode", "decode-0")]
    cases: dict[Engines, list[tuple[str, str]]] = {"one": [("decode", "engine-0")], "split": two, "auto": two}
    for engines, wanted in cases.items():
        stack = LocalStack(replace(plan, engines=engines))
        started.clear()
        monkeypatch.setattr(stack, "spawn", lambda kind, name, arguments: started.append((kind, name)))
        for kind, count in stack.plan.engine_counts.items():
            stack.spawn_members(kind, count)
        assert started == wanted
        settings = stack.member_arguments("decode", "x")
        assert (BOTH_ROLES in settings) == (engines == "one")


@pytest.mark.parametrize(
    ("flags", "engines", "counts"),
    [
        ([], "auto", (1, 1)),
        (["--engines", "one"], "one", (1, 1)),
        (["--engines", "split"], "split", (1, 1)),
        (["--prefill", "1"], "split", (1, 1)),
        (["--decode", "2"], "split", (1, 2)),
        (["--engines", "auto", "--decode", "2"], "split", (1, 2)),
    ],
)
def test_numbers_of_instances_mean_split_engines(
    flags: list[str], engines: str, counts: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[StackPlan] = []

    def run_serve(plan: StackPlan, data_dir: Path | None, **rest: object) -> int:
        plans.append(plan)
        return 0

    monkeypatch.setattr(serve, "run_serve", run_serve)
    result = CliRunner().invoke(app, ["serve", str(model_dir()), *flags])
    assert result.exit_code == 0, result.output
    assert [(plan.engines, plan.prefill, plan.decode) for plan in plans] == [(engines, *counts)]


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_one_engine_and_a_number_of_instances_are_refused(name: str) -> None:
    found = CliRunner().invoke(app, ["serve", str(model_dir()), "--engines", "one", f"--{name}", "1"]).exception
    assert isinstance(found, ConfigError)
    assert found.field == name
