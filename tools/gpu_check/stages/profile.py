"""A profiler's view of decode steps as graphs and of a prompt chunk: the longest operations, as tables."""

from torch.profiler import ProfilerActivity, profile

from tools.gpu_check.runners import stage
from tools.gpu_check.serving import SMALL, TINY_EXACT
from tools.gpu_check.where import Figures, Where, expect, stage_main

LIMIT_S = 40
BATCH, CONTEXT, CHUNK, STEPS, WARM = 64, 1024, 2048, 20, 4
ROWS = 25


def check(where: Where, figures: Figures) -> None:
    """Tell a table of each; fail if the profiler saw no work on the device."""
    served, batch, context, chunk = (TINY_EXACT, 2, 128, 128) if where.tiny else (SMALL, BATCH, CONTEXT, CHUNK)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if where.on_gpu else [])]
    order = "self_device_time_total" if where.on_gpu else "self_cpu_time_total"
    with stage(where, served, batch * context, context, figures) as loaded:
        runner = loaded.runner_of_graphs(batch)
        runner.run(loaded.decode_steps(batch, context, WARM + STEPS))
        for _ in range(WARM - 1):
            runner.go_on()
        with profile(activities=activities) as decode:
            while runner.go_on():
                pass
        runner.run(loaded.prompt(chunk))
        with profile(activities=activities) as prefill:
            runner.run(loaded.prompt(chunk))
    for name, seen in ((f"{STEPS} decode steps of {batch} sequences", decode), (f"a chunk of {chunk} tokens", prefill)):
        averages = seen.key_averages()
        busy = sum(getattr(event, order) for event in averages)
        expect(busy > 0, f"{name}: the profiler saw no work")
        figures[f"{name}: busy, ms"] = round(busy / 1e3, 3)
        figures[f"{name}, {served.shape}"] = averages.table(sort_by=order, row_limit=ROWS, max_name_column_width=60)


if __name__ == "__main__":
    stage_main("profile", check)
