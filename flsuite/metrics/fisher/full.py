"""The Fisher of a model's prediction as a full matrix, for small models."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from flsuite.data.spec import Task
from flsuite.metrics.fisher.columns import Expectation, Logits, columns
from flsuite.metrics.fisher.per_sample import Batch, sample_gradients


def full_fisher(
    module: nn.Module,
    names: Sequence[str],
    batches: Iterable[Batch],
    task: Task,
    expectation: Expectation = "exact",
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return the Fisher ``(d, d)`` of the parameters ``names``, flattened in that order.

    It has the dtype of the parameters and is summed in float64. The model runs in its current
    state, as in :func:`~flsuite.metrics.fisher.predictive.predictive_diagonal`, which has the same
    arguments.
    """
    size = sum(module.get_parameter(name).numel() for name in names)
    like = module.get_parameter(names[0])
    total = torch.zeros(size, size, dtype=torch.float64, device=like.device)
    samples = 0
    for rows in gradient_rows(module, names, batches, task, expectation, generator):
        at_columns = rows.flatten(0, 1).double()
        total.addmm_(at_columns.T, at_columns)
        samples += len(rows)
    return total.div_(max(samples, 1)).to(like.dtype)


def gradient_rows(
    module: nn.Module,
    names: Sequence[str],
    batches: Iterable[Batch],
    task: Task,
    expectation: Expectation = "exact",
    generator: torch.Generator | None = None,
) -> Iterator[Tensor]:
    """Yield the gradients of the Fisher's scalars, ``(n, columns, d)``, batch by batch.

    They are zero for frozen parameters. The Fisher is the mean over samples of their outer
    products.
    """
    logits = Logits(module)
    parameters = {name: module.get_parameter(name) for name in names}
    trained = {name: p.detach() for name, p in parameters.items() if p.requires_grad}

    for batch in batches:
        inputs = batch[:1]
        with torch.no_grad():
            at_logits = columns(logits(inputs), task, expectation, generator)
        for gradients in sample_gradients(logits, trained, inputs, at_logits):
            samples = len(next(iter(gradients.values())))
            yield torch.cat(
                [
                    gradients[name].flatten(2)
                    if name in gradients
                    else p.new_zeros(samples, len(at_logits), p.numel())
                    for name, p in parameters.items()
                ],
                2,
            )
