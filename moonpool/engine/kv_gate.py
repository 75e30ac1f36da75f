"""KV gates, dropped sequences, stopped runs and aborts of steps: set by one thread, read by another."""

import threading
from array import array

_ALL_LAYERS = 1 << 62
"""Above any layer."""


class StepState:
    """One step's state in three words, for code that looks at it without a lock: native code does.

    Attributes:
        address: of the words, 8 bytes each: whether the step was given up, the highest layer that may run, and whether
            something waits for the step's end.
    """

    def __init__(self, *, aborted: bool, highest: int, awaited: bool) -> None:
        self._words = array("q", (aborted, highest, awaited))
        self.address = self._words.buffer_info()[0]

    def abort(self) -> None:
        """No further layer runs."""
        self._words[0] = 1

    def open(self, layer: int) -> None:
        """This layer may run, and all lower ones."""
        self._words[1] = max(layer, self._words[1])

    def wait(self) -> None:
        """Something waits: after the step under way, its run comes back for it."""
        self._words[2] = 1

    def stopped(self, layer: int) -> bool:
        """Whether this layer must not run any more, or not yet."""
        return bool(self._words[0]) or self._words[1] < layer


class KVGates:
    """Open gates, dropped shares and aborts of steps that are not done. Steps are done in the order of their ids."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open: dict[int, int] = {}  # step -> highest open layer
        self._aborted: set[int] = set()
        self._cut: set[int] = set()
        self._hurried: set[int] = set()
        self._dropped: dict[int, set[int]] = {}  # step -> indices of its sequences
        self._watched: dict[int, StepState] = {}
        self._done: int | None = None  # all steps up to this one are done

    def __len__(self) -> int:
        """Steps that something is remembered of."""
        return len(self._open.keys() | self._aborted | self._cut | self._dropped.keys())

    def open(self, step_id: int, layer: int) -> None:
        """Opens the gates of this layer and all lower ones. Ignored once the step is done."""
        with self._changed:
            if self._is_done(step_id):
                return
            self._open[step_id] = max(layer, self._open.get(step_id, layer))
            if step_id in self._watched:
                self._watched[step_id].open(layer)
            self._changed.notify_all()

    def abort(self, step_id: int) -> None:
        """Gives the step up. Ignored once it is done."""
        with self._changed:
            if self._is_done(step_id):
                return
            self._give_up(step_id)
            self._changed.notify_all()

    def cut(self, step_id: int, *, hurried: bool = False) -> None:
        """Ends a run with the step that is being computed, at once if `hurried`. Ignored once it is done."""
        with self._changed:
            if not self._is_done(step_id):
                self._cut.add(step_id)
                if hurried:
                    self._hurried.add(step_id)
                if step_id in self._watched:
                    self._watched[step_id].wait()

    def is_cut(self, step_id: int) -> bool:
        """Whether the run is to end."""
        return step_id in self._cut  # one look-up: needs no lock

    def drop(self, step_id: int, index: int) -> None:
        """One sequence's share of the step counts for nothing. Ignored once the step is done."""
        with self._changed:
            if not self._is_done(step_id):
                self._dropped.setdefault(step_id, set()).add(index)

    def dropped(self, step_id: int) -> frozenset[int]:
        """Sequences of the step whose shares were dropped."""
        with self._changed:
            return frozenset(self._dropped.get(step_id, ()))

    def aborted(self, step_id: int) -> bool:
        """Whether the step was given up."""
        return step_id in self._aborted  # one look-up: needs no lock

    def is_urgent(self, step_id: int) -> bool:
        """Whether nothing else may go before the step: it was given up, or somebody waits for its end."""
        return step_id in self._aborted or step_id in self._hurried

    def wait(self, step_id: int, layer: int, timeout_s: float) -> bool:
        """Waits for a layer's gate.

        Returns:
            True when the gate is open; False when the step was given up or `timeout_s` has passed (then it is given
            up by that).
        """
        with self._changed:
            self._changed.wait_for(
                lambda: step_id in self._aborted or self._open.get(step_id, layer - 1) >= layer, timeout_s
            )
            if step_id not in self._aborted and self._open.get(step_id, layer - 1) >= layer:
                return True
            self._give_up(step_id)
            return False

    def watch(self, step_id: int, *, gated: bool) -> StepState:
        """What the step may look at from now on until it is done, in place of `aborted` and, when gated, `wait`."""
        with self._changed:
            highest = self._open.get(step_id, -1) if gated else _ALL_LAYERS
            aborted, awaited = step_id in self._aborted, step_id in self._cut
            self._watched[step_id] = StepState(aborted=aborted, highest=highest, awaited=awaited)
            return self._watched[step_id]

    def done(self, step_id: int) -> None:
        """Forgets this step and all before it, for good."""
        with self._changed:
            self._done = step_id
            self._open = {step: layer for step, layer in self._open.items() if step > step_id}
            self._aborted = {step for step in self._aborted if step > step_id}
            self._cut = {step for step in self._cut if step > step_id}
            self._hurried = {step for step in self._hurried if step > step_id}
            self._dropped = {step: shares for step, shares in self._dropped.items() if step > step_id}
            self._watched = {step: watch for step, watch in self._watched.items() if step > step_id}

    def _give_up(self, step_id: int) -> None:
        self._aborted.add(step_id)
        if step_id in self._watched:
            self._watched[step_id].abort()

    def _is_done(self, step_id: int) -> bool:
        return self._done is not None and step_id <= self._done
