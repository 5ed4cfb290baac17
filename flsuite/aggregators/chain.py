"""The transforms of an algorithm in their order, from a trained model to what is sent and back."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from flsuite.aggregators.part import Statistic
from flsuite.aggregators.transforms.base import FitView, Payload, Transform
from flsuite.messages import ClientUpdate
from flsuite.state import State, mismatch, nbytes


class Chain:
    """The way of an update from the client to the server.

    Args:
        transforms: The transforms, in their order.
        parameters: Names of the entries that are parameters. The others pass by.
        state: The shared state, as a template.
        statistics: What clients send beside it.
    """

    def __init__(
        self,
        transforms: Sequence[Transform],
        parameters: Sequence[str],
        state: State,
        statistics: Mapping[str, Statistic],
    ) -> None:
        self.transforms = list(transforms)
        self._names = [
            name for name in parameters if name in state and state[name].is_floating_point()
        ]
        self._state = template_of(state)
        self._statistics = {name: template_of(s.template) for name, s in statistics.items()}
        self._psd = frozenset(name for name, s in statistics.items() if s.is_psd)
        self._templates = self._all_templates(statistics)
        last = self._templates[-1]
        # Whether the change travels as a code. Otherwise the model itself does.
        self.packs = last.change is not self._templates[0].change
        self.added = self._added()

    @property
    def bytes_up(self) -> int:
        """Return the largest number of bytes of an update."""
        return nbytes(self._message()) if self.packs else nbytes([self._state, self._statistics])

    def pack(
        self, update: ClientUpdate, base: State, fit: FitView, notes: dict[str, Any]
    ) -> ClientUpdate:
        """Return a client's update as it is sent.

        Args:
            update: The update, whole.
            base: The global state that the client started from.
            fit: The fit. Each transform sees its own part of ``received``.
            notes: The notes of each transform, by its place. They may be changed.

        Raises:
            ValueError: If a number is not finite.
        """
        if not self.transforms:
            return update
        change = {name: update.state[name].double() - base[name].double() for name in self._names}
        first = payload = Payload(change, update.extras, self._psd)
        for place, transform in enumerate(self.transforms):
            key = str(place)
            own = replace(
                fit,
                received=fit.received.get(f"transforms/{place}", {}),
                memory=notes.setdefault(key, {}),
                base=base,
            )
            payload = transform.encode(payload, own)
        if self.packs:
            others = {k: v for k, v in update.state.items() if k not in self._names}
            message = {"change": payload.change, "statistics": payload.statistics}
            return replace(update, state=others, extras=message)
        if payload is not first:
            state = self._moved(update.state, base, first.change, payload.change, is_sent=True)
            update = replace(update, state=state, extras=payload.statistics)
        return update

    def unpack(self, update: ClientUpdate, base: State, received: dict[str, Any]) -> ClientUpdate:
        """Return an update as the server reads it.

        Raises:
            ValueError: If it cannot be read. The text says why.
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
            template = self._templates[place]
            payload = self.transforms[place].decode(payload, template, own)
        if payload is first:
            return update
        start = None if self.packs else first.change
        state = self._moved(update.state, base, start, payload.change, is_sent=False)
        return replace(update, state=state, extras=payload.statistics)

    def _moved(self, sent: State, base: State, before: Any, change: State, is_sent: bool) -> State:
        """Return ``base + change``, in float64, or in the dtypes of the state if it is sent.

        A parameter whose change no transform has touched is passed on as it is.
        """
        moved = dict(sent)
        for name in self._names:
            if before is not None and change[name] is before[name]:
                continue
            value = base[name].double() + change[name].double()
            moved[name] = value.to(self._state[name].dtype) if is_sent else value
        return {name: moved[name] for name in self._state}

    def _fault(self, update: ClientUpdate) -> str | None:
        """Return why a message is not one of this chain, before any transform reads it."""
        if not self.packs:
            return update.mismatch(self._state, self._templates[-1].statistics)
        others = {k: v for k, v in self._state.items() if k not in self._names}
        keys = {"change": 0, "statistics": 0}
        got = dict.fromkeys(update.extras, 0) if isinstance(update.extras, dict) else update.extras
        return mismatch(got, keys, "message") or mismatch(update.state, others)

    def _added(self) -> dict[str, Any]:
        """Return templates of the statistics that transforms add."""
        added: dict[str, Any] = {}
        for before, after in pairwise(self._templates):
            if after.change is before.change:  # a codec packs the statistics, and adds none
                added |= {k: v for k, v in after.statistics.items() if k not in before.statistics}
        return added

    def _message(self) -> dict[str, Any]:
        last = self._templates[-1]
        others = {k: v for k, v in self._state.items() if k not in self._names}
        return {"change": last.change, "statistics": last.statistics, "others": others}

    def _all_templates(self, statistics: Mapping[str, Statistic]) -> list[Payload]:
        change = {k: torch.empty(self._state[k].shape, device="meta") for k in self._names}
        templates = [Payload(change, dict(self._statistics), self._psd)]
        for transform in self.transforms:
            templates.append(transform.template(templates[-1]))
        return templates


def template_of(tree: Any) -> Any:
    """Return nested data whose tensors have a shape and a dtype, and no numbers."""
    if isinstance(tree, Tensor):
        return torch.empty(tree.shape, dtype=tree.dtype, device="meta")
    if isinstance(tree, Mapping):
        return {key: template_of(value) for key, value in tree.items()}
    return tree
