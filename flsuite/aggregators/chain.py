"""The chain of transforms between a trained model and the message that is sent."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from flsuite.aggregators.part import Statistic
from flsuite.aggregators.transforms.base import FitView, Payload, Transform
from flsuite.common.errors import FlsuiteError
from flsuite.common.messages import ClientUpdate
from flsuite.common.state import State, Tree, mismatch, mismatch_of_keys, nbytes, template_of


class Chain:
    """Packs updates on the client and unpacks them on the server.

    Args:
        transforms: The transforms, in order.
        parameters: Names of the entries that are parameters. The others bypass the transforms.
        state: The shared state, as a template.
        statistics: What clients send in addition to the state.

    Attributes:
        packs: Whether the change is sent as a code. Otherwise the model itself is sent.
        added: Templates of the statistics that transforms add.
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
        change = {name: torch.empty(state[name].shape, device="meta") for name in floats}
        self._names = list(change)
        own = template_of({name: statistic.template for name, statistic in statistics.items()})
        psd = frozenset(name for name, statistic in statistics.items() if statistic.is_psd)

        # The input of each transform, and the output of the last one.
        self._templates = [Payload(change, own, psd)]
        for transform in self.transforms:
            self._templates.append(transform.template(self._templates[-1]))
        self._last = self._templates[-1]
        self.added: Tree = {}
        for old, new in pairwise(self._templates):
            if new.change is old.change:  # a codec packs the statistics but adds none
                self.added |= {k: v for k, v in new.statistics.items() if k not in old.statistics}

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
            payload = transform.encode(payload, own)
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
            payload = self.transforms[place].decode(payload, self._templates[place], own)
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
        """Return why a message does not fit this chain, before any transform reads it."""
        if not self.packs:
            return update.mismatch(self._state, self._last.statistics)
        keys = ("change", "statistics")
        fault = mismatch_of_keys(update.extras, keys, "message")
        return fault or mismatch(update.state, self._others)
