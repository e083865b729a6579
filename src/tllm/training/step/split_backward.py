"""A backward pass in two halves: gradients of the inputs now, those of the weights later (Qi et al., 2023, ZB)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


@dataclass
class WeightHalf:
    """What is left to do: for each parameter the nodes that use it, and the gradients that came to these nodes."""

    users: list[tuple[Tensor, list[Node]]]
    arrived: dict[Node, tuple[Tensor | None, ...]]

    def run(self) -> None:
        """Add the weights' gradients where a whole backward pass would have; its hooks fire here."""
        for parameter, nodes in self.users:
            edges, gradients = [], []
            for node in nodes:
                for number, gradient in enumerate(self.arrived.get(node, ())):
                    if gradient is not None:
                        edges.append(GradientEdge(node, number))
                        gradients.append(gradient)
            if edges:
                torch.autograd.backward(edges, gradients, inputs=[parameter], retain_graph=True)
        self.users.clear()
        self.arrived.clear()


def input_half(out: Tensor, gradient: Tensor | None, x: Tensor) -> tuple[Tensor, WeightHalf]:
    """The gradient of `x` from that of `out` (None: out is a number), and what the weights' half needs.

    Only nodes between `out` and `x` run, and none of them works out a weight's gradient. A weight must not be used
    twice one after the other between x and out, or its first use would be counted again; beside each other is well.
    """
    assert out.grad_fn is not None
    users = _users(out.grad_fn, get_gradient_edge(x).node)
    arrived: dict[Node, tuple[Tensor | None, ...]] = {}
    hooks = [node.register_prehook(_keep(arrived, node)) for node in {node for _, nodes in users for node in nodes}]
    (of_x,) = torch.autograd.grad(out, x, gradient, retain_graph=True)
    for hook in hooks:
        hook.remove()
    return of_x, WeightHalf(users, arrived)


def _keep(arrived: dict[Node, tuple[Tensor | None, ...]], node: Node) -> Callable[..., None]:
    def keep(gradients: tuple[Tensor | None, ...]) -> None:
        arrived[node] = gradients

    return keep


def _users(root: Node, x: Node) -> list[tuple[Tensor, list[Node]]]:
    """For each parameter, the nodes on the way from root to x from which a way that avoids x leads to it."""
    order = _leaves_first(root)
    leads = {x}
    behind: dict[Node, dict[Node, None]] = {}  # leaves that are reached without passing a node that leads to x
    for node in order:
        following = _following(node)
        if any(other in leads for other in following):
            leads.add(node)
        behind[node] = {leaf: None for other in following if other not in leads for leaf in behind[other]}
        if not following and node is not x:
            behind[node] = {node: None}
    users: dict[Node, list[Node]] = {}
    for node in reversed(order):
        if node in leads and node is not x:
            for leaf in behind[node]:
                users.setdefault(leaf, []).append(node)
    return [(_variable(leaf), nodes) for leaf, nodes in users.items() if hasattr(leaf, "variable")]


def _leaves_first(root: Node) -> list[Node]:
    """Every node once, after all those it leads to; a loop, since a model is deeper than Python's stack."""
    order: list[Node] = []
    seen = {root}
    stack = [(root, iter(_following(root)))]
    while stack:
        node, rest = stack[-1]
        for other in rest:
            if other not in seen:
                seen.add(other)
                stack.append((other, iter(_following(other))))
                break
        else:
            order.append(node)
            stack.pop()
    return order


def _following(node: Node) -> list[Node]:
    return [other for other, _ in node.next_functions if other is not None]


def _variable(leaf: Any) -> Tensor:
    variable: Tensor = leaf.variable
    return variable
