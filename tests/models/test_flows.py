"""The conditional flow: density against autograd and torch.distributions, samples against it."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Independent, Normal, TransformedDistribution
from torch.distributions.transforms import AffineTransform

from flsuite.models.flows import ConditionalFlow, _ConditionalCoupling


def flow(
    features: int = 6, classes: int = 3, couplings: int = 4, scale: float = 0.3
) -> ConditionalFlow:
    """A flow far from the identity."""
    torch.manual_seed(0)
    made = ConditionalFlow(features, classes, couplings, width=16)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=scale)
    return made


def batch(features: int = 6, classes: int = 3, n: int = 50) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return 2 * torch.randn(n, features), torch.randint(0, classes, (n,))


@pytest.mark.parametrize("features", [2, 5])
def test_sampling_inverts_the_density_pass(features: int) -> None:
    made = flow(features, scale=0.1)
    z, y = batch(features)
    u, _ = made.density(z, y)
    assert (u - z).abs().max() > 0.5
    torch.testing.assert_close(made.generate(u, y), z, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(made.density(made.generate(z, y), y)[0], z, atol=1e-4, rtol=1e-4)


def test_log_determinants_are_those_of_autograds_jacobian() -> None:
    made = flow(scale=0.15)
    z, y = batch(n=5)
    u, log_density = made.density(z, y)
    base = Normal(0.0, 1.0).log_prob(u).sum(1)
    for i in range(5):
        jacobian = torch.autograd.functional.jacobian(
            lambda v, i=i: made.density(v[None], y[i : i + 1])[0][0], z[i]
        )
        torch.testing.assert_close(
            log_density[i] - base[i], torch.linalg.slogdet(jacobian)[1], atol=1e-4, rtol=1e-4
        )


def test_scales_are_bounded() -> None:
    layer = _ConditionalCoupling(4, 3, 8, limit=1.5)
    nn.init.constant_(layer.conditioner.final_layer.bias, 1e6)
    _, log_determinant = layer(torch.randn(2, 4), torch.eye(3)[:2])
    torch.testing.assert_close(log_determinant, torch.full((2,), 3.0))


@pytest.mark.parametrize("couplings", [2, 3])
def test_every_number_is_moved(couplings: int) -> None:
    for features in (6, 7):
        made = flow(features, couplings=couplings)
        y = batch(features)[1]
        base = torch.randn(1, features, generator=torch.Generator().manual_seed(0))
        jacobian = torch.autograd.functional.jacobian(
            lambda v, f=made, y=y: f.density(v, y[:1])[0][0], base
        ).squeeze()
        # A number that no coupling has changed is one of the codes.
        same = (jacobian - 1).abs() < 1e-6
        assert not (same & ((jacobian != 0).sum(1, keepdim=True) == 1)).any()


def test_an_untrained_flow_is_a_standard_normal() -> None:
    made = ConditionalFlow(6, 3, 4, 16)
    z, y = batch()
    standard = Independent(Normal(torch.zeros(6), 1.0), 1)
    torch.testing.assert_close(made.density(z, y)[1], standard.log_prob(z))


def test_a_flow_that_shifts_and_scales_is_a_normal_of_torch_distributions() -> None:
    """One coupling with a constant network: z = (u2 exp(s) + t, u1), the same for every class."""
    made = ConditionalFlow(4, 2, 1, 8)
    bias = made.flows[0].conditioner.final_layer.bias
    bias.data.copy_(torch.tensor([0.4, -0.7, 1.0, 2.0]))
    scale = (2 * torch.tanh(bias[:2] / 2)).exp()
    affine = AffineTransform(
        torch.cat((bias[2:], torch.zeros(2))), torch.cat((scale, torch.ones(2))), event_dim=1
    )
    expected = TransformedDistribution(Independent(Normal(torch.zeros(4), 1.0), 1), affine)
    z, y = batch(4, 2)
    densities = made.density(z, y)[1], expected.log_prob(z)
    torch.testing.assert_close(*densities)
    torch.testing.assert_close(*(torch.autograd.grad(d.sum(), bias) for d in densities))


def test_the_density_integrates_to_one_for_every_class() -> None:
    made = flow(2, couplings=2, scale=0.2)
    axis = torch.linspace(-12, 12, 161)
    grid = torch.cartesian_prod(axis, axis)
    values = []
    for c in range(3):
        values.append(made.density(grid, torch.full((len(grid),), c))[1].detach())
        assert float(values[-1].exp().sum()) * (24 / 160) ** 2 == pytest.approx(1, abs=0.01)
    assert not torch.allclose(values[0], values[1])


def test_normflows_own_passes_agree() -> None:
    made = flow()
    z, y = batch()
    torch.testing.assert_close(made.log_prob(z, context=torch.eye(3)[y]), made.density(z, y)[1])


def test_the_flow_is_float32_under_autocast() -> None:
    made = flow()
    z, y = batch()
    expected = made.density(z, y)
    with torch.autocast("cpu", torch.bfloat16):
        found = made.density(z, y)
        assert made.generate(z, y).dtype == torch.float32
    assert found[1].dtype == torch.float32
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
