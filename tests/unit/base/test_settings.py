"""A setting is stated once: configs show what the cores' records state, and the simulator knows every field."""

import dataclasses
import typing
from functools import partial

import pytest

from moonpool.base.config import config_class
from moonpool.base.frozen import frozen
from moonpool.base.settings import complete, default_of, setting, stated_values, statements
from moonpool.conductor.core.routing import RoutingConfig
from moonpool.conductor.core.scheduler import SchedulerLimits
from moonpool.engine.decode.core.settings import DecodeSettings
from moonpool.engine.emulated.profile import load_profile
from moonpool.engine.prefill.core.settings import PrefillSettings
from moonpool.simulator.cluster.admission import limits_of
from moonpool.simulator.cluster.conductor import routing_of
from moonpool.simulator.cluster.config import LEAPS, ClusterConfig, decode_core_settings, prefill_core_settings

RECORDS = {
    SchedulerLimits: "conductor",
    RoutingConfig: "conductor",
    PrefillSettings: "prefill",
    DecodeSettings: "decode",
}


@frozen
class Record:
    """Two settings and a fact."""

    blocks: int
    wait_s: float = setting(2.0, "seconds of patience", gt=0)
    turns: int = setting(3, "turns", ge=1)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_a_config_shows_each_stated_setting_with_the_default_of_its_record(record: type) -> None:
    shown = config_class(RECORDS[record]).model_fields
    types = typing.get_type_hints(record)
    for name, (meaning, bounds) in statements(record).items():
        assert shown[name].default == default_of(record, name)
        assert shown[name].description == meaning
        assert shown[name].annotation == types[name]
        assert {key for key in bounds if any(hasattr(bound, key) for bound in shown[name].metadata)} == set(bounds)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_a_field_that_a_config_shows_is_stated_by_the_record(record: type) -> None:
    """A default beside that of the record would be a second statement."""
    shown = config_class(RECORDS[record]).model_fields
    twice = {each.name for each in dataclasses.fields(record)} & shown.keys() - statements(record).keys()
    assert twice <= NOT_THE_SAME


NOT_THE_SAME = {
    "policy", "decode_policy", "shadow_policy",  # of a config a name, of a record what the name stands for
    "blocks", "block_size", "max_num_batched_tokens",  # of a config a wish or 0, of a record what the engine has
}  # fmt: skip


def test_the_simulator_knows_each_field_of_each_core() -> None:
    config = ClusterConfig(profile=load_profile("llama-70b-a800"))
    prefill_core_settings(config)
    decode_core_settings(config, LEAPS)
    limits_of(config)
    routing_of(config, 0)


def test_a_field_that_is_neither_given_nor_left_out_for_a_reason_is_an_error() -> None:
    given = partial(Record, blocks=1, turns=1)
    assert complete(given, {"wait_s": "nobody waits"}) == Record(1, turns=1)
    for left_out in ({}, {"wait_s": "", "turns": ""}, {"wait_s": "", "other": ""}):
        with pytest.raises(TypeError, match="must be given, or left out"):
            complete(given, left_out)


def test_a_service_copies_what_its_config_says() -> None:
    assert stated_values(Record, Record(1, 5.0, 6)) == {"wait_s": 5.0, "turns": 6}
