"""A pass over the graphs of torch.compile: products of few rows that read the same input become one launch.

Models ask for them one by one (a gate, then what it gates; queries, keys, values), and only the compiled graph of a
layer says which of them share their input.
"""

from __future__ import annotations

import operator
from pathlib import Path

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node


class JoinLinear(CustomGraphPass):
    """For inductor's `post_grad_custom_pre_pass`."""

    def __call__(self, graph: Graph) -> None:
        """Join in place. Weights and biases have to be the graph's inputs, so that they are there for the first."""
        single = torch.ops.stepbind.few_rows_linear.default
        together: dict[tuple[Node, Node], list[Node]] = {}
        for node in graph.find_nodes(op="call_function", target=single):
            x, weight, bias, arrived = node.args
            if weight.op == "placeholder" and (bias is None or bias.op == "placeholder"):
                together.setdefault((x, arrived), []).append(node)
        for nodes in together.values():
            if len(nodes) > 1:
                _join(graph, nodes)

    def uuid(self) -> object:
        """What a cached graph depends on besides its own text."""
        return get_hash_for_files((str(Path(__file__)),))


JOIN_LINEAR = JoinLinear()
"""The one instance: torch.compile takes a layer for another one, and compiles it again, when its options differ."""


def _join(graph: Graph, nodes: list[Node]) -> None:
    """Put one call where the first of the products stands, and its results in their places."""
    x, _, _, arrived = nodes[0].args
    weights, biases = [node.args[1] for node in nodes], [node.args[2] for node in nodes]
    with graph.inserting_before(nodes[0]):
        joined = graph.call_function(torch.ops.stepbind.joined_linear.default, (x, weights, biases, arrived))
        joined.meta["val"] = [node.meta["val"] for node in nodes]
        parts = [graph.call_function(operator.getitem, (joined, index)) for index in range(len(nodes))]
    for node, part in zip(nodes, parts, strict=True):
        part.meta.update(node.meta)
        node.replace_all_uses_with(part)
        graph.erase_node(node)
