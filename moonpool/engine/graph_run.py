"""The mode that replays all layers of a decode step as one captured graph, and then samples the tokens."""

from functools import partial

from moonpool.engine.cuda_graphs import GraphShape
from moonpool.engine.layer_run import LayerRun
from moonpool.engine.step_run import StepRun


class GraphRun(LayerRun):
    """Computes steps for which a graph was captured; other steps go layer by layer."""

    def _shape(self, run: StepRun) -> GraphShape | None:
        graphs = self._stage.graphs
        # A graph has no products of adapters in it, no rows of pictures, and no positions but the tokens' places.
        plain = run.packed.loras is None and run.packed.rope_positions is None
        if graphs is None or not plain or any(part.media for part in run.step.sequences):
            return None
        return graphs.shape(run.step, run.packed)

    def _compute(self, run: StepRun) -> bool:
        """Give all the stage's layers to the stream as one graph; return False if the step was aborted before."""
        if run.shape is None:
            return super()._compute(run)
        if self._stage.kv_gates.aborted(run.step.step_id):  # once begun, a graph goes through all layers
            return False
        layers, memory = range(self._stage.model.layer_begin, self._stage.model.layer_end), self._stage.platform.memory
        for layer in layers:
            memory.prepare_layer(layer)
        self._stage.platform.stream.run(partial(self._replay, run))
        for layer in layers:
            memory.finish_layer(layer, None)
        return True

    def _replay(self, run: StepRun) -> None:
        assert self._stage.graphs is not None
        assert run.shape is not None
        run.hidden = self._stage.graphs.run(run.shape, run.batch, run.hidden)
