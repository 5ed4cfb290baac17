"""FedFisher: Jhunjhunwala, Wang and Joshi 2024, algorithm 1.

FedFisher: Leveraging Fisher Information for One-Shot Federated Learning, AISTATS,
arXiv:2403.12329.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningModule

from flsuite.aggregators.part import Server, Statistic
from flsuite.aggregators.rules.after_fit import after_fit, plain_batches
from flsuite.aggregators.rules.base import LinearRule, timed, withheld_by
from flsuite.aggregators.rules.fisher_forms import FORMS, FisherForm, FormName
from flsuite.aggregators.rules.sample_noise import SampleNoise
from flsuite.aggregators.rules.solvers import (
    Block,
    Corrections,
    Iterate,
    SolverName,
    best_iterate,
    default_steps,
    solvers,
)
from flsuite.common.arguments import PositiveInt, Settings
from flsuite.common.client import ClientContext
from flsuite.common.errors import log
from flsuite.common.messages import ClientUpdate
from flsuite.common.random import torch_generator
from flsuite.common.state import State, StateLayout, Tree, cast, divided, scaled
from flsuite.data.federated import Batch
from flsuite.data.loader import TrainLoader
from flsuite.metrics.fisher.estimates import Expectation
from flsuite.metrics.privacy import require_small_delta
from flsuite.models.abilities import require_logits


@dataclass(frozen=True)
class FedFisher(LinearRule, Settings):
    """Minimizes the sum of the clients' losses, each approximated as a quadratic around its model.

    Take it to merge models that were trained once, of Linear and Conv2d layers.

    A client with n_i samples sends its model w_i and the Fisher information F_i of its model's own
    prediction. The server minimizes ``Q(w) = 1/2 sum p_i (w - w_i)^T F_i (w - w_i)`` with
    ``p_i = n_i / N``, and takes the minimum closest to the mean ``wbar = sum p_i w_i``. It starts
    from the mean. Buffers take FedAvg's value, and so do parameters that no client's Fisher
    determines.

    The minimum overfits. Models along the way are therefore scored on the server's samples, and the
    best is kept, the first on a tie.

    The server half uses the sums of ``n_i w_i``, ``n_i F_i`` and ``n_i F_i w_i``. K-FAC needs every
    client's factors instead of the sum of ``n_i F_i``. At most one client's model is held at a
    time.

    Logged as ``train/<name>``:

    - ``server_seconds``: the time of the aggregation, without waiting for clients;
    - ``selected_step``: the solver's step whose model is kept, 0 for the mean;
    - ``selected_solver``: 0, or 1 if ``gd`` of ``cg+gd`` is kept;
    - ``selected_score``: its accuracy on the server's samples;
    - ``residual``: the norm of Q's gradient there, relative to the norm at the mean;
    - ``fisher_zero``: the fraction of parameters that no client's Fisher determines;
    - ``fisher_epsilon``: what one Fisher with noise reveals about a sample, the mean over clients.

    Args:
        fisher: ``kfac`` has two factors per Linear or Conv2d layer. It refuses other layers with
            parameters. ``diag`` supports any parameter. ``full`` is the whole matrix, for models of
            at most 20,000 parameters.
        solver: ``cg`` runs conjugate gradients per layer. ``gd`` is lemma 1 of the paper, gradient
            descent with the step ``1 / lambda_max`` per layer. ``cg+gd`` keeps the better of both
            by score. They have the same limit, but reach it through different models. Without a
            score, it is ``cg``. ``adam`` is the solver of the paper's tables. ``exact`` goes to the
            limit: a division for ``diag``, conjugate gradients until convergence for ``kfac``, and
            a pseudoinverse for ``full``, which ignores directions below float32 rounding. Secure
            aggregation rounds sums to fixed-point steps. ``exact`` amplifies that error where the
            Fishers are as small as the steps, so parameters there may differ greatly from a
            plain sum. The early steps of the other solvers hardly amplify it.
        steps: Number of solver steps. For ``exact``, the maximum for ``kfac``. Default: 100 for
            ``cg+gd`` and 200 for ``cg`` if models are scored, and 50 for both if not, because the
            limit overfits. 2,000 for the others.
        samples: Maximum number of a client's samples for its Fisher, without augmentation.
            ``null`` means all.
        expectation: ``exact`` is the expectation over the model's prediction, with one backward
            pass per output. ``sampled`` draws one label per sample, with one backward pass.
        select: Whether to keep the model with the best score on the server's samples
            (``data.server_samples``). Without these samples or this option, the last model is kept.
            ``cg`` and ``gd`` score the steps 0, 1, 2, 5, 10, 20, 50, 100 and so on, ``adam`` every
            hundredth, and all of them the last one.
        noise: Noise on each client's Fisher, for differential privacy of its samples. Models have
            none: add the callback :class:`~flsuite.callbacks.DPSGD`, which also counts the Fishers
            in its epsilon. Default: no noise.
        epsilon_inside: Whether ``adam`` divides by ``sqrt(v + .01)``, as the public code does for
            K-FAC, instead of ``sqrt(v) + .01``.
    """

    fisher: FormName = "kfac"
    solver: SolverName = "cg+gd"
    steps: PositiveInt | None = None
    samples: PositiveInt | None = 2000
    expectation: Expectation = "exact"
    select: bool = True
    noise: SampleNoise | None = None
    epsilon_inside: bool = False

    weighting = "samples"
    needs = frozenset({"current models", "classes or labels"})
    withholds = withheld_by("Fisher information")

    # The client half

    def measure(self, client: ClientContext, module: LightningModule, loader: TrainLoader) -> None:
        form, task = self._form(client.layout), loader.data.spec.task
        draws = torch_generator(loader.seed, "FedFisher", loader.round, loader.client)

        def fisher(batches: Iterable[Batch]) -> Any:
            return form.measure(module, (batches, task, self.expectation, draws))

        with after_fit(client, module):
            if self.noise is None:
                batches = plain_batches(module, loader, self.samples)
                client.extras["fisher"] = fisher(batches)
            else:
                drawn = self.noise.mean(
                    lambda sample: fisher([sample]),
                    lambda: plain_batches(module, loader),
                    client.samples,
                    self.samples,
                    draws,
                )
                client.extras["fisher"] = form.repaired(drawn)
                client.metrics["fisher_epsilon"] = self.noise.epsilon(client.samples, self.samples)

    def statistics(self, layout: StateLayout, state: State) -> dict[str, Statistic]:
        template = self._form(layout).template(state)
        # K-FAC factors cannot be summed: the server needs every client's factors.
        is_sum, is_psd = self.fisher != "kfac", self.fisher != "diag"
        noise, most = self.noise, self.samples
        release = None if noise is None else lambda samples: noise.release(samples, most)
        return {"fisher": Statistic(template, is_sum, is_psd, release=release)}

    def terms(self, update: ClientUpdate, layout: StateLayout) -> Tree:
        """Return ``n_i``, ``n_i w_i``, ``n_i F_i w_i`` and, except for K-FAC, ``n_i F_i``."""
        own = self._form(layout).terms(update.state, update.extras["fisher"])
        return {**scaled({"samples": 1.0, "model": update.state, **own}, update.samples)}

    def _form(self, layout: StateLayout) -> FisherForm:
        return FORMS[self.fisher](layout)

    # The server half

    def result(self, server: Server, sums: Tree, updates: Sequence[ClientUpdate]) -> State:
        with timed(server):
            means = divided(sums, sums["samples"])
            form = self._form(server.layout)
            blocks = form.blocks(means, updates)

            def model(corrections: Corrections) -> State:
                values = [block.mean + d for block, d in zip(blocks, corrections, strict=True)]
                return means["model"] | form.entries(values, server.state)

            chosen = self._minimised(server, blocks, model)
            server.metrics.update(_report(blocks, chosen))
        return model(chosen.corrections)

    def _minimised(
        self, server: Server, blocks: Sequence[Block], model: Callable[[Corrections], State]
    ) -> Iterate:
        """Return the solver's best model by score, or its last model."""
        score = server.tools.score if self.select else None
        steps = self.steps or default_steps(self.solver, score is not None)
        if score is None:
            if self.select:
                ways = solvers(self.solver, scored=False)
                why = server.tools.missing.get("score", "nothing scores models here")
                log.info("FedFisher takes the last model of %s: %s", ways[0], why)
            return best_iterate(blocks, self.solver, steps, inside=self.epsilon_inside)

        def scored(corrections: Corrections) -> float:
            return score(cast(model(corrections), server.state))

        return best_iterate(blocks, self.solver, steps, scored, self.epsilon_inside)

    # Before the first round

    def check(self, model: LightningModule) -> None:
        require_logits("FedFisher", model)

    def prepare(self, server: Server) -> None:
        if self.noise is not None:
            mean, whose = server.layout.samples // server.layout.clients, "a client's mean samples"
            require_small_delta("SampleNoise", self.noise.delta, mean, whose)
        self._form(server.layout).require(server)


def _report(blocks: Sequence[Block], chosen: Iterate) -> dict[str, float]:
    """Return the metrics of the chosen model, for the log."""
    before = sum(float(block.residual.square().sum()) for block in blocks)
    after = 0.0
    for block, correction in zip(blocks, chosen.corrections, strict=True):
        after += float((block.residual - block.product(correction)).square().sum())
    unknown = sum(int((block.diagonal() == 0).sum()) for block in blocks)

    metrics = {"selected_step": float(chosen.step)}
    if chosen.score is not None:
        metrics |= {"selected_solver": float(chosen.way), "selected_score": chosen.score}
    metrics["residual"] = math.sqrt(after / before) if before else 0.0
    metrics["fisher_zero"] = unknown / max(1, sum(b.mean.numel() for b in blocks))
    return metrics
