"""The paper's Algorithms 1 and 2 in its own variables: slow, and independent of the rest of the package.

A network of L−1 linear transfers φ with elementwise σ between them, as in the paper's Section 2:

    z_l = φ_l(θ_l, a_{l−1}),   a_l = σ(z_l),   a_0 = X,   J(θ) = L_y(φ_{L−1}(θ_{L−1}, a_{L−2}))

Both algorithms make a forward pass and then walk back over the quadratic penalty energy

    E(θ, a, z) = L_y(φ(θ_{L−1}, a_{L−2})) + Σ_l γ/2·‖σ(z_l) − a_l‖² + ρ/2·‖φ(θ_l, a_{l−1}) − z_l‖²

with ρ = γ = 1/τ. They differ in the step for θ_l: explicit in Algorithm 1, proximal in Algorithm 2. Indices
here start at 0: `z[0]` is the paper's z_1 and `a[0]` its a_1.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

Theta = list[Tensor]
"""Flat parameter vectors, one for each transfer."""


@dataclass(frozen=True)
class Network:
    """The functions that make up a network and its loss.

    Attributes:
        transfers: `φ_l(θ_l, a)`, linear in the flat vector θ_l; the last one feeds the loss.
        activation: σ, elementwise.
        loss: `L_y`, from the last transfer's output to a number.
    """

    transfers: list[Callable[[Tensor, Tensor], Tensor]]
    activation: Callable[[Tensor], Tensor]
    loss: Callable[[Tensor], Tensor]

    def forward(self, theta: Theta, X: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """The forward pass: z and a of every transfer but the last."""
        z: list[Tensor] = []
        a: list[Tensor] = []
        for phi, parameters in zip(self.transfers[:-1], theta, strict=False):
            z.append(phi(parameters, a[-1] if a else X))
            a.append(self.activation(z[-1]))
        return z, a

    def objective(self, theta: Theta, X: Tensor) -> Tensor:
        """J(θ; X, y)."""
        _, a = self.forward(theta, X)
        return self.loss(self.transfers[-1](theta[-1], a[-1] if a else X))

    def energy(self, theta: Theta, a: list[Tensor], z: list[Tensor], X: Tensor, tau: float) -> Tensor:
        """E(θ, a, z) with ρ = γ = 1/τ."""
        total = self.loss(self.transfers[-1](theta[-1], a[-1] if a else X))
        for layer, phi in enumerate(self.transfers[:-1]):
            before = a[layer - 1] if layer else X
            total = total + (self.activation(z[layer]) - a[layer]).square().sum() / (2 * tau)
            total = total + (phi(theta[layer], before) - z[layer]).square().sum() / (2 * tau)
        return total


def algorithm1(network: Network, theta: Theta, X: Tensor, tau: float) -> Theta:
    """One iteration of Algorithm 1: sequential gradient steps of size τ on E. Returns θ^{k+1}."""

    def explicit(layer: int, theta: Theta, a: list[Tensor], z: list[Tensor]) -> Tensor:
        return gradient_step(
            lambda t: network.energy(_with(theta, layer, t), a, z, X, tau), theta[layer], tau
        )

    return _sweep(network, theta, X, tau, explicit)


def algorithm2(network: Network, theta: Theta, X: Tensor, tau: float, tau_theta: float) -> Theta:
    """One iteration of Algorithm 2, ProxProp: as Algorithm 1, but proximal steps for θ_l. Returns θ^{k+1}."""

    def proximal(layer: int, theta: Theta, a: list[Tensor], z: list[Tensor]) -> Tensor:
        before = a[layer - 1] if layer else X
        return proximal_step(network.transfers[layer], theta[layer], before, z[layer], tau_theta)

    return _sweep(network, theta, X, tau, proximal)


Step = Callable[[int, Theta, list[Tensor], list[Tensor]], Tensor]


def _sweep(network: Network, theta: Theta, X: Tensor, tau: float, step: Step) -> Theta:
    """Forward pass, then steps a, b and c of the algorithms, from the last layer to the first.

    The steps for θ_l come from the activations a^k of the forward pass and the updated z^{k+½}.
    """
    z, a = network.forward(theta, X)
    result = list(theta)
    energy = partial(network.energy, X=X, tau=tau)
    last = len(theta) - 1
    # (a) gradient step on (θ_{L−1}, a_{L−2}), both at the forward pass
    result[last] = _descend(partial(energy, a=a, z=z), theta, last, tau)
    if last:
        above = _with(a, last - 1, _descend(partial(energy, theta, z=z), a, last - 1, tau))
    for layer in reversed(range(last)):
        # (b) gradient step on z_l with a_l updated, then on a_{l−1} with z_l updated. The terms of E that are
        # not named here vanish at the forward pass and have no gradient there.
        moved = _with(z, layer, _descend(partial(energy, theta, above), z, layer, tau))
        if layer:
            above = _with(a, layer - 1, _descend(partial(energy, theta, z=moved), a, layer - 1, tau))
        # (c) the step on θ_l
        result[layer] = step(layer, theta, a, moved)
    return result


def _descend(
    function: Callable[[list[Tensor]], Tensor], values: list[Tensor], index: int, tau: float
) -> Tensor:
    """A gradient step on one entry of a list."""
    return gradient_step(lambda value: function(_with(values, index, value)), values[index], tau)


def gradient_step(function: Callable[[Tensor], Tensor], point: Tensor, tau: float) -> Tensor:
    """`x − τ∇f(x)`."""
    point = point.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(function(point), point)
    return (point - tau * gradient).detach()


def proximal_step(
    phi: Callable[[Tensor, Tensor], Tensor], theta: Tensor, a: Tensor, z: Tensor, tau_theta: float
) -> Tensor:
    """`argmin_θ ½‖φ(θ, a) − z‖² + ‖θ − θ^k‖²/(2τ_θ)`, with φ(·, a) written out as a matrix (Appendix B)."""
    A = torch.autograd.functional.jacobian(lambda t: phi(t, a).flatten(), theta)
    M = torch.eye(len(theta), dtype=theta.dtype) / tau_theta + A.T @ A
    solution: Tensor = torch.linalg.solve(M, theta / tau_theta + A.T @ z.flatten())
    return solution


def _with(values: list[Tensor], index: int, value: Tensor) -> list[Tensor]:
    """The list with one entry replaced."""
    return [*values[:index], value, *values[index + 1 :]]
