"""A step's KV gates, dropped sequences, stopped runs and aborts: set by one thread, read by another."""

import threading
from array import array

_ALL_LAYERS = 1 << 62
"""Above any layer."""


class KVGates:
    """Open gates, dropped sequences and aborts of steps that are not done. Steps are done in the order of their ids."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open: dict[int, int] = {}  # step -> highest open layer
        self._aborted: set[int] = set()
        self._stopped: set[int] = set()
        self._urgent: set[int] = set()
        self._dropped: dict[int, set[int]] = {}  # step -> indices of dropped sequences
        self._signals: dict[int, StepState] = {}
        self._done: int | None = None  # all steps up to this one are done

    def __len__(self) -> int:
        """Number of steps with some state."""
        return len(self._open.keys() | self._aborted | self._stopped | self._dropped.keys())

    def open(self, step_id: int, layer: int) -> None:
        """Open the gates for this layer and all lower layers. Ignored once the step is done."""
        with self._changed:
            if self._is_done(step_id):  # late news: no thread waits for this step any more
                return
            self._open[step_id] = max(layer, self._open.get(step_id, layer))
            if step_id in self._signals:
                self._signals[step_id].open(layer)
            self._changed.notify_all()

    def abort(self, step_id: int) -> None:
        """Abort the step. Ignored once the step is done."""
        with self._changed:
            if self._is_done(step_id):  # too late: the step's result stands
                return
            self._abort(step_id)
            self._changed.notify_all()

    def stop_run(self, step_id: int, *, urgent: bool = False) -> None:
        """End a run with the step under way. `urgent`: that step must not wait for others.

        Ignored once the step is done.
        """
        with self._changed:
            if not self._is_done(step_id):
                self._stopped.add(step_id)
                if urgent:
                    self._urgent.add(step_id)
                if step_id in self._signals:  # a native call takes several steps (ADR 43): this word ends the call
                    self._signals[step_id].wait()

    def is_stopped(self, step_id: int) -> bool:
        """Tell whether the run is to end."""
        return step_id in self._stopped  # one look-up: needs no lock

    def drop(self, step_id: int, index: int) -> None:
        """Drop one sequence from the step. Ignored once the step is done."""
        with self._changed:
            if not self._is_done(step_id):
                self._dropped.setdefault(step_id, set()).add(index)

    def dropped(self, step_id: int) -> frozenset[int]:
        """Return the indices of dropped sequences."""
        with self._changed:
            return frozenset(self._dropped.get(step_id, ()))

    def aborted(self, step_id: int) -> bool:
        """Tell whether the step was aborted."""
        return step_id in self._aborted  # one look-up: needs no lock

    def is_urgent(self, step_id: int) -> bool:
        """Tell whether the step must not wait for others: the step was aborted, or the end is urgent."""
        return step_id in self._aborted or step_id in self._urgent

    def wait(self, step_id: int, layer: int, timeout_s: float) -> bool:
        """Wait for a layer's gate.

        Returns:
            True if the gate is open. False if the step was aborted; after `timeout_s` the step is aborted.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: step_id in self._aborted or self._open.get(step_id, layer - 1) >= layer, timeout_s
            )
            if step_id not in self._aborted and self._open.get(step_id, layer - 1) >= layer:
                return True
            # The I/O process has stopped reporting: without a limit the stage would wait for ever (ADR 2).
            self._abort(step_id)
            return False

    def signals(self, step_id: int, *, gated: bool) -> "StepState":
        """Return words that the step may read until done, in place of `aborted` and, if gated, `wait`."""
        with self._changed:
            # Gates open and aborts come also before the step begins, so the words start from what is known.
            highest = self._open.get(step_id, -1) if gated else _ALL_LAYERS
            aborted, awaited = step_id in self._aborted, step_id in self._stopped
            self._signals[step_id] = StepState(aborted=aborted, highest=highest, awaited=awaited)
            return self._signals[step_id]

    def done(self, step_id: int) -> None:
        """Forget this step and all earlier steps."""
        with self._changed:
            self._done = step_id
            self._open = {step: layer for step, layer in self._open.items() if step > step_id}
            self._aborted = {step for step in self._aborted if step > step_id}
            self._stopped = {step for step in self._stopped if step > step_id}
            self._urgent = {step for step in self._urgent if step > step_id}
            self._dropped = {step: sequences for step, sequences in self._dropped.items() if step > step_id}
            self._signals = {step: signals for step, signals in self._signals.items() if step > step_id}

    def _abort(self, step_id: int) -> None:
        self._aborted.add(step_id)
        if step_id in self._signals:
            self._signals[step_id].abort()

    def _is_done(self, step_id: int) -> bool:
        return self._done is not None and step_id <= self._done


class StepState:
    """One step's state in three words, which native code reads without a lock. See `StepSignals`."""

    def __init__(self, *, aborted: bool, highest: int, awaited: bool) -> None:
        self._words = array("q", (aborted, highest, awaited))
        self.address = self._words.buffer_info()[0]

    def abort(self) -> None:
        """Let no further layer run."""
        self._words[0] = 1

    def open(self, layer: int) -> None:
        """Let this layer and all lower ones run."""
        self._words[1] = max(layer, self._words[1])

    def wait(self) -> None:
        """Let the run return to Python after the step under way."""
        self._words[2] = 1

    def stopped(self, layer: int) -> bool:
        return bool(self._words[0]) or self._words[1] < layer
