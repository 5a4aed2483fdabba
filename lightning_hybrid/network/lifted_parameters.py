"""Parameters that TorchDynamo has written into a graph, as its inputs.

It does so with those of an optimizer that the network's Python looks at (for a learning rate), as
for a step that is captured. Here they are weights like all others.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from torch import fx, nn

from lightning_hybrid._torch.graphs import copy_source


def lift_parameters(module: fx.GraphModule) -> tuple[fx.GraphModule, list[nn.Parameter]]:
    """The graph with the parameters that it holds as its last inputs, and these in their order.

    Where there are none, it is the graph itself; TorchDynamo goes on to use that one.
    """
    if not any(isinstance(each, nn.Parameter) for each in _held(module).values()):
        return module, []
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(module.graph, copies))
    for original, copy in copies.items():
        copy_source(original, copy)
    found: dict[int, tuple[nn.Parameter, list[fx.Node]]] = {}
    for node, value in _held(module).items():
        if isinstance(value, nn.Parameter):
            found.setdefault(id(value), (value, []))[1].append(copies[node])
    for _, nodes in found.values():
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        place = graph.inserting_after(inputs[-1]) if inputs else graph.inserting_before()
        with place:
            lifted = graph.placeholder(nodes[0].name)
        lifted.meta.update(nodes[0].meta)
        for node in nodes:
            node.replace_all_uses_with(lifted)
            graph.erase_node(node)
    return fx.GraphModule(module, graph), [value for value, _ in found.values()]


def _held(module: fx.GraphModule) -> dict[fx.Node, Any]:
    nodes = module.graph.find_nodes(op="get_attr")
    return {node: attrgetter(str(node.target))(module) for node in nodes}
