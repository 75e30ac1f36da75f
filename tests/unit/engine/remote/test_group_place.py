"""A host's place by the variables of what started the hosts, and by a stage's flags."""

import pytest

from moonpool.base.errors import ConfigError
from moonpool.engine.remote.config import StageConfig
from moonpool.engine.remote.group_place import GroupPlace, read_place
from moonpool.engine.roles.process import DecodeProcessConfig, EngineProcessConfig, PrefillProcessConfig

LWS = {"LWS_LEADER_ADDRESS": "prefill-0.prefill.ns", "LWS_WORKER_INDEX": "2", "LWS_GROUP_SIZE": "3"}
TORCHRUN = {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "4000", "RANK": "3", "GROUP_RANK": "1", "WORLD_SIZE": "4"}
SLURM = {"SLURM_STEP_NODELIST": "gpu[012-014,020]", "SLURM_PROCID": "1"}


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({}, None),
        ({"RANK": "1", "LWS_LEADER_ADDRESS": ""}, None),
        (LWS, GroupPlace("prefill-0.prefill.ns", 29501, 2)),
        (TORCHRUN, GroupPlace("10.0.0.7", 4000, 1)),
        ({"MASTER_ADDR": "fd00::7", "RANK": "3"}, GroupPlace("fd00::7", 29501, 3)),
        (SLURM, GroupPlace("gpu012", 29501, 1)),
        (SLURM | {"SLURM_STEP_NODELIST": "a-1,a-2"}, GroupPlace("a-1", 29501, 1)),
        (SLURM | {"SLURM_STEP_NODELIST": "rack[1-2]-node,b"}, GroupPlace("rack1-node", 29501, 1)),
        (LWS | TORCHRUN | SLURM, GroupPlace("prefill-0.prefill.ns", 29501, 2)),
    ],
)
def test_variables_of_launchers(variables: dict[str, str], place: GroupPlace | None) -> None:
    assert read_place(variables) == place


@pytest.mark.parametrize(
    ("variables", "field", "message"),
    [
        ({"LWS_LEADER_ADDRESS": "a"}, "LWS_WORKER_INDEX", "must be set, as LWS_LEADER_ADDRESS is"),
        ({"MASTER_ADDR": "a"}, "GROUP_RANK", "must be set, as MASTER_ADDR is"),
        (TORCHRUN | {"GROUP_RANK": "one"}, "GROUP_RANK", "must be a number from 0 to 1048576, got 'one'"),
        (TORCHRUN | {"MASTER_PORT": "70000"}, "MASTER_PORT", "must be a number from 0 to 65535, got '70000'"),
        (SLURM | {"SLURM_PROCID": "-1"}, "SLURM_PROCID", "must be a number from 0 to 1048576, got '-1'"),
    ],
)
def test_a_wrong_variable_is_named(variables: dict[str, str], field: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_place(variables)
    assert (caught.value.field, caught.value.message) == (field, message)


@pytest.mark.parametrize(
    ("flags", "variables", "place"),
    [
        (["--leader", "a:1", "--node-rank", "1"], {"MASTER_ADDR": "b"}, ("a:1", 1)),
        (["--node-rank", "1"], LWS, ("prefill-0.prefill.ns:29501", 1)),
        (["--leader", "a:1"], LWS, ("a:1", 2)),
        ([], {"MASTER_ADDR": "fd00::7", "RANK": "3"}, ("[fd00::7]:29501", 3)),
    ],
)
def test_flags_go_before_variables(flags: list[str], variables: dict[str, str], place: tuple[str, int]) -> None:
    assert StageConfig.load([*flags, "--model", "m"]).place(variables) == place


@pytest.mark.parametrize(
    ("flags", "variables", "field"),
    [
        ([], {}, "leader"),
        (["--leader", "a:1"], {}, "node_rank"),
        ([], LWS | {"LWS_WORKER_INDEX": "0"}, "node_rank"),
        (["--leader", "0.0.0.0:1", "--node-rank", "1"], {}, "leader"),
        (["--leader", "a:0", "--node-rank", "1"], {}, "leader"),
    ],
)
def test_a_stage_without_a_place_is_refused(flags: list[str], variables: dict[str, str], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        StageConfig.load([*flags, "--model", "m"]).place(variables)
    assert caught.value.field == field


LEADER = ["--model", "m", "--conductor", "a:1", "--set", "nnodes=2"]
HOSTS = ["--set", "stages_listen=:29501", "--pipeline-parallel-size", "2"]


@pytest.mark.parametrize(
    ("config", "more", "field"),
    [
        (PrefillProcessConfig, [], "stages_listen"),
        (PrefillProcessConfig, ["--set", "stages_listen=:29501"], "pipeline_parallel_size"),
        (PrefillProcessConfig, ["--engine", "emulated:llama-70b-a800"], "nnodes"),
        (PrefillProcessConfig, [*HOSTS, "--set", "quantization=int4", "--set", "imatrix=m.dat"], "imatrix"),
        (DecodeProcessConfig, [], "stages_listen"),
    ],
)
def test_a_leader_that_cannot_have_other_hosts_says_why(
    config: type[EngineProcessConfig], more: list[str], field: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        config.load([*LEADER, *more])
    assert caught.value.field == field


@pytest.mark.parametrize("config_class", [PrefillProcessConfig, DecodeProcessConfig])
def test_a_leader_with_a_stage_for_each_host(config_class: type[EngineProcessConfig]) -> None:
    config = config_class.load([*LEADER, "--set", "stages_listen=0.0.0.0:29501", "--set", "pipeline_parallel_size=3"])
    assert (config.nnodes, config.pipeline_parallel_size) == (2, 3)
