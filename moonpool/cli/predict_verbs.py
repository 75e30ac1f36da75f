"""The verbs that measure and predict: bench, rerun, plan, replay, calibrate, simulate."""

from pathlib import Path
from typing import Annotated

import typer

from moonpool.base.errors import ConfigError
from moonpool.cli.lazy_verbs import add_lazy_group
from moonpool.cli.options import (
    PREDICT,
    START,
    KVDtype,
    Model,
    verb,
)
from moonpool.cli.predict_options import BenchServeOptions, PlanOptions, ReplayOptions

app = typer.Typer()

bench_app = typer.Typer(help="Measure a stack that runs.", no_args_is_help=True)


@bench_app.callback()
def bench() -> None:
    """Measure a stack that runs."""


@bench_app.command("serve")
@verb
def bench_serve(options: BenchServeOptions) -> None:
    """Send requests when they are due, whatever the others do: TTFT, TPOT, ITL, E2E, and goodput within limits.

    Times count from when a request was due, so a stalled server cannot hide the stall.
    Exit status: 0 when every request was answered or refused for overload, 1 when not.
    """
    from moonpool.cli.bench_serve import run_serve

    raise typer.Exit(run_serve(options))


@app.command("rerun", rich_help_panel=PREDICT)
def rerun_(
    journal: Annotated[Path, typer.Argument(help="A journal's file, or the folder that journal_dir names.")],
    events: Annotated[bool, typer.Option(help="Print each event with its actions.")] = False,
    check: Annotated[bool, typer.Option(help="Look at the core's invariants after each event (slow).")] = False,
    policy: Annotated[
        str, typer.Option(metavar="MODULE", help="A conductor's own policy, MODULE:OBJECT; its code runs.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object per file.")] = False,
) -> None:
    """Run a service's recorded decisions again and stop at the first that differs.

    Exit status: 0 when all are equal, 1 when one differs, 2 when the journal is missing or damaged.
    """
    from moonpool.cli.rerun import run_rerun

    raise typer.Exit(run_rerun(journal, events=events, check=check, as_json=as_json, policy=policy))


@app.command(rich_help_panel=PREDICT)
@verb
def plan(options: PlanOptions) -> None:
    """Find the least-cost mix of prefill, decode and kvstore instances that serves a trace within the limits."""
    from moonpool.cli.simulate import run_plan

    run_plan(options)


@app.command(rich_help_panel=PREDICT)
@verb
def replay(options: ReplayOptions) -> None:
    """Send a trace to a running stack; report latencies and predictions as the simulator does, beside the simulator's.

    Exit status: 0 when every request was answered, 1 when not.
    """
    from moonpool.cli.replay import run_replay

    raise typer.Exit(run_replay(options))


@app.command(rich_help_panel=PREDICT)
def calibrate(
    out: Annotated[Path, typer.Option(help="YAML file to write.")],
    model: Model = "",
    name: Annotated[str, typer.Option(help="Name of the profile; default: the file's.")] = "",
    hardware: Annotated[str, typer.Option(help="The class of machine, in words.")] = "",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    kv_cache_dtype: KVDtype = "auto",
    threads: Annotated[int, typer.Option(min=0, help="Compute threads; 0 = all cores.")] = 0,
    repeats: Annotated[int, typer.Option(min=1, help="Steps of each size; the median counts.")] = 5,
    url: Annotated[str, typer.Option(help="Measure a running engine of another make at this URL instead.")] = "",
    make: Annotated[str, typer.Option(help="Make of the engine at --url: vllm or sglang.")] = "vllm",
) -> None:
    """Measure a model on this machine, or a running engine, and write a profile for emulation, simulator and `plan`."""
    from moonpool.cli.calibrate import run_calibrate, run_calibrate_engine
    from moonpool.cli.models import chosen_model

    if url:
        if make not in ("vllm", "sglang"):
            raise ConfigError("make", f"must be vllm or sglang, is {make!r}")
        run_calibrate_engine(make, url, chosen_model(model), out, name=name, hardware=hardware, repeats=repeats)
        return
    run_calibrate(chosen_model(model), out, name=name, hardware=hardware, dtype=dtype,
                  kv_cache_dtype=kv_cache_dtype, threads=threads, repeats=repeats)  # fmt: skip


app.add_typer(bench_app, name="bench", rich_help_panel=START)
add_lazy_group(
    app,
    "simulate",
    "simulate",
    PREDICT,
    "Experiments in virtual time. Without --trace, requests are made up from --seed.",
)
