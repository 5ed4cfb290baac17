"""The path of an update: transforms, then sums or masks."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from flsuite.aggregators.aggregator import Aggregator
from flsuite.aggregators.objectives.checks import wrong
from flsuite.aggregators.part import Statistic
from flsuite.aggregators.rules.base import LinearRule
from flsuite.aggregators.transforms.base import FitView, Payload, Transform, empty
from flsuite.common.errors import FlsuiteError, with_place
from flsuite.common.messages import (
    MOST,
    POOLED,
    Broadcast,
    ClientFailure,
    ClientUpdate,
    Outcome,
    is_count,
    replaced,
)
from flsuite.common.state import (
    State,
    StateLayout,
    Sums,
    Tree,
    flatten_tree,
    mismatch,
    mismatch_of_keys,
    nbytes,
    nested_like,
    template_of,
)


class Pipeline:
    """Packs updates on the client and unpacks them on the server.

    Args:
        transforms: The transforms, in order.
        parameters: Names of the entries that are parameters. The others bypass the transforms.
        state: The shared state, as a template.
        statistics: What clients send in addition to the state.

    Attributes:
        packs: Whether the change is sent as a code. Otherwise the model itself is sent.
        statistics: Templates of an unpacked update's statistics, including what transforms add.
        bytes_up: The largest number of bytes of an update.
    """

    def __init__(
        self,
        transforms: Sequence[Transform],
        parameters: Sequence[str],
        state: State,
        statistics: Mapping[str, Statistic],
    ) -> None:
        self.transforms = list(transforms)
        self._state = template_of(state)
        floats = (name for name in parameters if name in state and state[name].is_floating_point())
        change = {name: empty(state[name].shape, torch.float32) for name in floats}
        self._names = list(change)
        own = template_of({name: statistic.template for name, statistic in statistics.items()})
        psd = frozenset(name for name, statistic in statistics.items() if statistic.is_psd)

        # The input of each transform, and the output of the last one.
        self._templates = [Payload(change, own, psd)]
        for transform in self.transforms:
            template = transform.template(self._templates[-1])
            self._templates.append(_payload(transform, "template", template))
        self._last = self._templates[-1]
        self.statistics: Tree = dict(own)
        for old, new in pairwise(self._templates):
            if new.change is old.change:  # a codec packs the statistics but adds none
                added = {k: v for k, v in new.statistics.items() if k not in old.statistics}
                self.statistics |= added

        self.packs = self._last.change is not change
        self._others = {name: v for name, v in self._state.items() if name not in change}
        packed = self._last.change, self._last.statistics, self._others
        self.bytes_up = nbytes(packed if self.packs else (self._state, own))

    def pack(
        self, update: ClientUpdate, base: State, fit: FitView, notes: dict[str, Any]
    ) -> ClientUpdate:
        """Return a client's update as it is sent.

        Args:
            update: The complete update.
            base: The global state that the client started from.
            fit: The fit. Each transform sees its own part of ``received``.
            notes: The notes of each transform, by its position. They may be changed.

        Raises:
            ValueError: If a number is not finite.
        """
        if not self.transforms:
            return update
        change = {name: update.state[name].double() - base[name].double() for name in self._names}
        first = payload = Payload(change, update.extras, self._templates[0].psd)
        for place, transform in enumerate(self.transforms):
            received = fit.received.get(f"transforms/{place}", {})
            memory = notes.setdefault(str(place), {})
            own = replace(fit, received=received, memory=memory, base=base)
            payload = _payload(transform, "encode", transform.encode(payload, own))
        if self.packs:
            others = {name: update.state[name] for name in self._others}
            message = {"change": payload.change, "statistics": payload.statistics}
            return replace(update, state=others, extras=message)
        if payload is not first:
            state = self._moved(update.state, base, first.change, payload.change, is_sent=True)
            update = replace(update, state=state, extras=payload.statistics)
        return update

    def unpack(self, update: ClientUpdate, base: State, received: dict[str, Any]) -> ClientUpdate:
        """Return an update as the server reads it.

        Raises:
            ValueError: If it cannot be read. The message says why.
        """
        if fault := self._fault(update):
            raise ValueError(fault)
        if not self.transforms:
            return update
        if self.packs:
            first = payload = Payload(update.extras["change"], update.extras["statistics"])
        else:
            change = {k: update.state[k].double() - base[k].double() for k in self._names}
            first = payload = Payload(change, update.extras)
        for place in reversed(range(len(self.transforms))):
            own = received.get(f"transforms/{place}", {})
            transform = self.transforms[place]
            read = transform.decode(payload, self._templates[place], own)
            payload = _payload(transform, "decode", read)
        if payload is first:
            return update
        start = None if self.packs else first.change
        state = self._moved(update.state, base, start, payload.change, is_sent=False)
        return replace(update, state=state, extras=payload.statistics)

    def _moved(self, sent: State, base: State, before: Any, change: State, is_sent: bool) -> State:
        """Return ``base + change``, in float64, or in the state's dtypes if ``is_sent``.

        A parameter whose change no transform has touched is returned unchanged.
        """
        moved = dict(sent)
        for name in self._names:
            if before is not None and change.get(name) is before[name]:
                continue
            if name not in change or change[name].shape != base[name].shape:
                own = f"shape {tuple(change[name].shape)}" if name in change else "none"
                raise FlsuiteError(
                    f"a transform returned a wrong change of {name}: it needs shape "
                    f"{tuple(base[name].shape)}, got {own}; return every entry in its shape"
                )
            value = base[name].double() + change[name].double()
            moved[name] = value.to(self._state[name].dtype) if is_sent else value
        return {name: moved[name] for name in self._state}

    def _fault(self, update: ClientUpdate) -> str | None:
        """Return why a message does not fit these transforms, before any transform reads it."""
        if not self.packs:
            return update.mismatch(self._state, self._last.statistics)
        keys = ("change", "statistics")
        fault = mismatch_of_keys(update.extras, keys, "message")
        return fault or mismatch(update.state, self._others)


def _payload(transform: Transform, method: str, returned: Any) -> Payload:
    """Return what a transform has returned, if it is a payload."""
    if not isinstance(returned, Payload):
        raise wrong(transform, method, returned, "a Payload, such as payload._replace(change=...)")
    return returned


class Uplink:
    """Packs updates where clients train, and unpacks them on the server.

    Under secure aggregation, a client keeps its contribution to the sums. It sends what cannot be
    summed in the clear: integer tensors, which take a maximum, and statistics that the rule needs
    per client.

    Args:
        aggregator: The algorithm.
        layout: Names and groups of the shared entries.
        state: The shared state, as a template.
        classes: Number of classes that clients count.
        masks: Whether the server learns only sums.
        most_samples: The largest number of training samples that a client may claim.

    Attributes:
        pipeline: The transforms, for this model.
        statistics: Templates of an update's statistics after unpacking.
        unmasked: A template of what a client keeps to be masked. Names and shapes count.
        bytes_clear: Bytes sent in the clear in addition to masked sums.
    """

    def __init__(
        self,
        aggregator: Aggregator,
        layout: StateLayout,
        state: State,
        classes: int = 0,
        masks: bool = False,
        most_samples: int = MOST,
    ) -> None:
        self.aggregator = aggregator
        self.layout = layout
        self.masks = masks
        self._classes, self._most_samples = 0 if masks else classes or None, most_samples
        own = aggregator.rule.statistics(layout, state)
        self._own = frozenset(own)
        self._single = [name for name, statistic in own.items() if not statistic.is_sum]
        statistics = aggregator.statistics(layout, state)
        self.pipeline = Pipeline(aggregator.transforms, layout.parameters, state, statistics)
        self.statistics = self.pipeline.statistics

        # A contribution as a template: names and shapes count.
        self._example: Tree = {}
        if masks:
            extras = dict.fromkeys(self.statistics, 0.0)
            extras |= {name: statistic.template for name, statistic in statistics.items()}
            counts = torch.zeros(classes, dtype=torch.int64)
            update = ClientUpdate(0, 1, 1, 1, counts, state, extras)
            self._example = template_of(self.contribution(update))
        self.unmasked, integers = _by_kind(self._example)
        self._clear = integers, {name: self.statistics[name] for name in self._single}
        self.bytes_clear = nbytes(self._clear)

    @property
    def sums_parts(self) -> bool:
        """Return whether a worker may sum the contributions of a part's clients."""
        is_linear = isinstance(self.aggregator.rule, LinearRule)
        return is_linear and not (self.masks or self.pipeline.packs or self._single)

    def pack(
        self, update: ClientUpdate, base: State, fit: FitView, notes: dict[str, Any]
    ) -> tuple[ClientUpdate, State]:
        """Return a client's update as it is sent, and what stays on its device to be masked.

        Args:
            update: The complete update.
            base: The global state that the client started from.
            fit: The fit.
            notes: The client's notes for the transforms. They may be changed.

        Raises:
            ValueError: If a number is not finite.
        """
        packed = self.pipeline.pack(update, base, fit, notes)
        unmasked: State = {}
        if self.masks:
            read = self.pipeline.unpack(packed, base, fit.received)
            unmasked, integers = _by_kind(self.contribution(read))
            clear = {name: read.extras[name] for name in self._single}
            # Class counts reveal a client's data, and an algorithm of sums does not need them.
            unknown = update.class_counts.new_zeros(0)
            packed = replace(update, state=integers, extras=clear, class_counts=unknown)
        # The size of the message, as if the client were on another machine.
        packed.bytes_up = nbytes(packed.state) + nbytes(packed.extras)
        return packed, unmasked

    def unpack(self, update: ClientUpdate, base: State, received: dict[str, Any]) -> ClientUpdate:
        """Return an update as the server reads it.

        Raises:
            ValueError: If it cannot be read, or claims too much. The message says why.
        """
        if fault := self._fault_of_claims(update):
            raise ValueError(fault)
        if self.masks:
            if fault := update.mismatch(*self._clear):
                raise ValueError(fault)
            return update
        return self.pipeline.unpack(update, base, received)

    def _fault_of_claims(self, update: ClientUpdate) -> str | None:
        """Return what is wrong with what a client says about its data, or ``None``."""
        counts = update.class_counts
        if self._classes is not None and len(counts) != self._classes:
            return f"it has {len(counts)} class counts; {self._classes} are expected"
        # One client could otherwise take the whole mean. A pooled fit has all samples.
        if update.samples > self._most_samples and update.client != POOLED:
            return (
                f"it claims {update.samples} training samples, and {self._most_samples} is the "
                "most that a client may have; if that is right, raise trainer.max_share"
            )
        return None

    def checked(self, outcome: Outcome, broadcast: Broadcast) -> Outcome:
        """Return an outcome unpacked, or a failure if its update must not reach the aggregator.

        Args:
            outcome: The outcome of a fit.
            broadcast: The version that the client started from.
        """
        if outcome.failed:
            return outcome

        # Check before aggregation: a single NaN would spoil the mean of all clients.
        update = outcome.update
        try:
            fault = update.fault(reads_numbers=False)
            if fault is None and update.partial is None:
                update = self.unpack(update, broadcast.state, broadcast.extras)
                outcome = replaced(outcome, update=update)
            fault = fault or outcome.fault()
        except ValueError as error:
            fault = with_place(error)
        except (
            AttributeError,
            TypeError,
            LookupError,
            RuntimeError,
        ) as error:  # of unexpected types
            fault = f"it cannot be read ({type(error).__name__}: {with_place(error, longest=200)})"
        if fault is None:
            return outcome
        if fault.startswith("extras"):
            fault += f" ({self.aggregator.name} says what clients send, by its parts' statistics)"
        steps = update.steps if is_count(update.steps) else 0
        reason = f"its update was refused: {fault}"
        return ClientFailure(update.client, update.round, reason, steps=steps)

    def contribution(self, update: ClientUpdate) -> Tree:
        """Return what a client adds to the sums of a round."""
        return self.aggregator.contribution(replaced(update, part=0), self.layout, self._own)

    def summed(self, masked: State, updates: Sequence[ClientUpdate]) -> Iterator[ClientUpdate]:
        """Return the updates of a round, the last one with the sums of what was masked.

        Args:
            masked: The sums of the masked tensors, by name.
            updates: The updates, with their integer tensors.
        """
        total, integers = Sums(), Sums()
        for update in updates:
            integers.add(dict(update.state))
        total.add(nested_like(self._example, masked | integers.values))
        # As if one worker had summed them: the last update carries the sums.
        last = len(updates) - 1
        for place, update in enumerate(updates):
            yield replace(update, state={}, partial=total if place == last else Sums())


def _by_kind(tree: Tree) -> tuple[State, State]:
    """Return the floating-point leaves of nested data, and the integer ones, by path."""
    flat = flatten_tree(tree)
    floats = {name: value for name, value in flat.items() if value.is_floating_point()}
    return floats, {name: value for name, value in flat.items() if name not in floats}


_PARTS = 20  # divides evenly among 1, 2, 4, 5 or 10 workers
_LARGEST = 16  # clients per part, which bounds the work repeated when a worker dies


def part_size(cohort: int) -> int:
    """Return the number of clients in each part of a cohort.

    A worker that trains a whole part sends the sum of its models instead of each model. Rounding
    depends on the order of summation, so the parts depend only on the cohort, not on the workers.
    """
    return min(max(cohort // _PARTS, 1), _LARGEST)
