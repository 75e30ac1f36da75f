"""Gates and aborts of steps in one engine process: set by the receiving thread, awaited by the computing one."""

import threading


class Gates:
    """Open gates and aborts of steps that are not done yet. Steps are done in the order of their ids."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open: dict[int, int] = {}  # step -> highest open layer
        self._aborted: set[int] = set()
        self._done: int | None = None  # all steps up to this one are done

    def __len__(self) -> int:
        """Steps that something is remembered of."""
        return len(self._open.keys() | self._aborted)

    def open(self, step_id: int, layer: int) -> None:
        """Opens the gates of this layer and all lower ones. Ignored once the step is done."""
        with self._changed:
            if self._is_done(step_id):
                return
            self._open[step_id] = max(layer, self._open.get(step_id, layer))
            self._changed.notify_all()

    def abort(self, step_id: int) -> None:
        """Gives the step up. Ignored once it is done."""
        with self._changed:
            if self._is_done(step_id):
                return
            self._aborted.add(step_id)
            self._changed.notify_all()

    def aborted(self, step_id: int) -> bool:
        """Whether the step was given up."""
        return step_id in self._aborted  # one look-up: needs no lock

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
            self._aborted.add(step_id)
            return False

    def done(self, step_id: int) -> None:
        """Forgets this step and all before it, for good."""
        with self._changed:
            self._done = step_id
            self._open = {step: layer for step, layer in self._open.items() if step > step_id}
            self._aborted = {step for step in self._aborted if step > step_id}

    def _is_done(self, step_id: int) -> bool:
        return self._done is not None and step_id <= self._done
