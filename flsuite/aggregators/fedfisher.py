"""FedFisher: Jhunjhunwala, Wang and Joshi 2024, algorithm 1.

FedFisher: Leveraging Fisher Information for One-Shot Federated Learning, AISTATS,
arXiv:2403.12329.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, get_args

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from flsuite.aggregators.base import Aggregator
from flsuite.aggregators.fisher_forms import FORMS, FisherForm, FormName
from flsuite.aggregators.logit_pass import LogitPass
from flsuite.aggregators.solvers.blocks import Block
from flsuite.aggregators.solvers.selection import (
    Corrections,
    Iterate,
    SolverName,
    best_iterate,
    default_steps,
    iterates,
    solvers,
)
from flsuite.aggregators.sums import mean_state, means, state_summands, sum_up
from flsuite.data.loader import Batch
from flsuite.errors import FlsuiteError, require_one_of, require_whole
from flsuite.messages import ClientContext, ClientUpdate
from flsuite.metrics.fisher import Expectation, measuring
from flsuite.state import State, StateLayout

__all__ = ["FedFisher"]

log = logging.getLogger("flsuite")


class FedFisher(Aggregator):
    """The minimum of the clients' losses, each as a quadratic around the client's model.

    A client with n_i samples sends its model w_i and the Fisher information F_i of its model's own
    prediction. The server minimises ``Q(w) = 1/2 sum p_i (w - w_i)^T F_i (w - w_i)`` with
    ``p_i = n_i / N``, and wants of the many minima the one closest to the mean
    ``wbar = sum p_i w_i``. It starts from the mean. Buffers take FedAvg's value, and so do
    parameters that no client's Fisher determines.

    The minimum overfits: on the way, models are scored on the server's samples, and the best is
    taken, of equals the first.

    The server half works from the sums of ``n_i w_i``, ``n_i F_i`` and ``n_i F_i w_i``. K-FAC needs
    every client's factors in place of the sum of ``n_i F_i``. It never holds more than one model of
    a client.

    Logged as ``train/<name>``:

    - ``server_seconds``: the time of the aggregation, without waiting for clients;
    - ``selected_step``: the solver's step whose model is taken, 0 for the mean;
    - ``selected_solver``: 0, or 1 if ``gd`` of ``cg+gd`` is taken;
    - ``selected_score``: its accuracy on the server's samples;
    - ``residual``: the norm of Q's gradient there, relative to that at the mean;
    - ``fisher_zero``: the share of parameters that no client's Fisher determines.

    Args:
        fisher: ``kfac`` has two factors per Linear or Conv2d layer. It refuses other layers with
            parameters. ``diag`` takes any parameter. ``full`` is the whole matrix, for models of at
            most 20,000 parameters.
        solver: ``cg`` takes conjugate gradients per layer. ``gd`` is lemma 1 of the paper, gradient
            descent with the step ``1 / lambda_max`` per layer. ``cg+gd`` takes the better of both
            by score. They have one limit, and reach it through other models. Without a score it is
            ``cg``. ``adam`` is the one of the paper's tables. ``exact`` goes to the limit: a
            division for ``diag``, conjugate gradients until they converge for ``kfac``, and a
            pseudoinverse for ``full``. A secure sum is rounded to fixed steps. ``exact`` amplifies
            that error where the Fishers are as small as the steps, and parameters there may end far
            from those of the plain sum. The early steps of the other solvers hardly amplify it.
        steps: The solver's steps, for ``exact`` the most that ``kfac`` takes. Default: 100 for
            ``cg+gd`` and 200 for ``cg`` if models are scored, and 50 for both if not, because the
            limit overfits. It is 2,000 for the others.
        samples: The largest number of a client's samples that its Fisher is computed over, without
            augmentation. 2,000 cost a fraction of all, and ``null`` is all.
        expectation: ``exact`` is the expectation over the model's prediction, with a backward pass
            per output. ``sampled`` draws one label per sample, with one backward pass.
        select: Whether to take the model with the best score on the server's samples
            (``data.server_samples``). Without them, or without this, it is the last one. ``cg`` and
            ``gd`` score the steps 0, 1, 2, 5, 10, 20, 50, 100 and so on, ``adam`` each hundredth,
            and all of them the last.
        epsilon_inside: Whether ``adam`` divides by ``sqrt(v + .01)``, as the public code does for
            K-FAC, instead of ``sqrt(v) + .01``.
    """

    def __init__(
        self,
        fisher: FormName = "kfac",
        solver: SolverName = "cg+gd",
        steps: int | None = None,
        samples: int | None = 2000,
        expectation: Expectation = "exact",
        select: bool = True,
        epsilon_inside: bool = False,
    ) -> None:
        self.fisher = fisher
        self.solver = solver
        self.steps = steps
        self.samples = samples
        self.expectation = expectation
        self.select = select
        self.epsilon_inside = epsilon_inside
        self._check_arguments()
        # The server needs every client's factors. The other forms are sums.
        self.clear_extras = ("fisher",) if fisher == "kfac" else ()
        self.psd_extras = () if fisher == "diag" else ("fisher",)

    def expected_extras(self, global_state: State) -> dict[str, Any]:
        return {"fisher": self._form.template(global_state)}

    def client_callbacks(self, client: ClientContext) -> list[Callback]:
        return [_FisherPass(client, self._form, self.samples, self.expectation)]

    def aggregate(self, global_state: State, updates: Iterator[ClientUpdate]) -> State:
        summed = sum_up(updates, self.summands, self.clear_extras)
        new = self.from_sums(global_state, summed.sums, summed.updates)
        self.metrics["server_seconds"] += summed.seconds
        return new

    def summands(self, update: ClientUpdate) -> State:
        """Return what a client adds to the sums, all that the server needs of its model.

        These are ``n_i w_i`` (``state/NAME``), ``n_i F_i w_i`` (``product/NAME``), and except for
        K-FAC, ``n_i F_i`` (``fisher/NAME``), in float64.
        """
        own = self._form.summands(update.state, update.extras["fisher"])
        return state_summands(update) | {n: value * update.samples for n, value in own.items()}

    def from_sums(self, global_state: State, sums: State, updates: Sequence[ClientUpdate]) -> State:
        started = time.perf_counter()
        mean = means(sums, updates)
        averaged = mean_state(mean, updates, global_state)
        blocks = self._form.blocks(mean, updates)

        def model(corrections: Corrections) -> State:
            values = [block.mean + d for block, d in zip(blocks, corrections, strict=True)]
            return averaged | self._form.entries(values, global_state)

        chosen = self._minimise(blocks, model)
        self._report(blocks, chosen)
        self.metrics["server_seconds"] = time.perf_counter() - started
        return model(chosen.corrections)

    def configure(self, layout: StateLayout) -> None:
        """Prepare for a model, and refuse one that the Fisher does not cover."""
        super().configure(layout)
        if fault := self._form.fault():
            raise FlsuiteError(f"FedFisher: {fault}")

    @property
    def _form(self) -> FisherForm:
        return FORMS[self.fisher](self.layout)

    def _minimise(self, blocks: Sequence[Block], model: Callable[[Corrections], State]) -> Iterate:
        """Return the solver's best model by score, or its last."""
        score = self.tools.score if self.select else None
        steps = default_steps(self.solver, score is not None) if self.steps is None else self.steps
        ways = solvers(self.solver, score is not None)
        paths = {way: iterates(blocks, way, steps, self.epsilon_inside) for way in ways}

        if score is None:
            if self.select:
                why = self.tools.missing.get("score", "nothing scores models here")
                log.info("FedFisher takes the last model of %s: %s", ways[0], why)
            return best_iterate(blocks, paths[ways[0]], ways[0], None)

        best = [best_iterate(blocks, paths[way], way, lambda d: score(model(d))) for way in ways]
        # max returns the first of equals.
        chosen = max(range(len(best)), key=lambda way: best[way].score or 0.0)
        self.metrics["selected_solver"] = float(chosen)
        return best[chosen]

    def _report(self, blocks: Sequence[Block], chosen: Iterate) -> None:
        before = sum(float(block.residual.square().sum()) for block in blocks)
        after = 0.0
        for block, correction in zip(blocks, chosen.corrections, strict=True):
            after += float((block.residual - block.product(correction)).square().sum())
        unknown = sum(int((block.diagonal() == 0).sum()) for block in blocks)

        self.metrics["selected_step"] = float(chosen.step)
        if chosen.score is not None:
            self.metrics["selected_score"] = chosen.score
        self.metrics["residual"] = math.sqrt(after / before) if before else 0.0
        self.metrics["fisher_zero"] = unknown / max(1, sum(b.mean.numel() for b in blocks))

    def _check_arguments(self) -> None:
        require_one_of("FedFisher", get_args(FormName), fisher=self.fisher)
        require_one_of("FedFisher", get_args(SolverName), solver=self.solver)
        require_one_of("FedFisher", get_args(Expectation), expectation=self.expectation)
        require_whole("FedFisher", 1, steps=self.steps, samples=self.samples)


class _FisherPass(LogitPass):
    """The client half, which measures the Fisher of the trained model."""

    def __init__(
        self, client: ClientContext, form: FisherForm, samples: int | None, expectation: Expectation
    ) -> None:
        super().__init__(client, "FedFisher", samples)
        self.form = form
        self.expectation: Expectation = expectation

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        spec: Any = getattr(pl_module, "spec", None)
        if spec is None:
            raise FlsuiteError(
                f"FedFisher: model must be a flsuite.models.ClientModel, which knows the shape of "
                f"its data, got {type(pl_module).__name__}"
            )
        # Now, because the training would be lost.
        with measuring(pl_module):
            x = torch.zeros(1, *spec.shape, device=pl_module.device)
            self.form.require(pl_module, x)

    def extras(
        self, module: LightningModule, batches: Iterator[Batch], generator: torch.Generator
    ) -> dict[str, Any]:
        return {"fisher": self.form.measure(module, batches, self.expectation, generator)}
