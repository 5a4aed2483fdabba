"""A network that is one checkpointed region, so that it can be cut.

Its layers take the place of the region in the graph, marked; each stage puts its marked layers into
a region of its own. What is kept for the backward is what was kept, and what crosses the cuts.
(Where there are several regions, the network is cut between them.)
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx, nn

from lightning_hybrid._torch.graphs import higher_order_name

_MARK = "checkpointed"


def open_only_region(module: fx.GraphModule) -> None:
    """Let the layers of the only checkpointed region take its place in a captured graph.

    Args:
        module: from TorchDynamo; changed in place. Reentrant regions stay: their gradients depend
            on what goes into them as a whole.
    """
    regions = [n for n in module.graph.nodes if is_region(n)]
    if len(regions) != 1 or regions[0].kwargs.get("use_reentrant"):
        return
    (region,) = regions
    body = _named(module, region.args[0].target)
    mark = region.target, dict(region.kwargs)
    copies: dict[fx.Node, Any] = {}
    inputs = iter(region.args[1:])
    results: Any = ()
    with module.graph.inserting_before(region):
        for node in body.graph.nodes:
            if node.op == "placeholder":
                copies[node] = next(inputs)
            elif node.op == "output":
                results = fx.node.map_arg(node.args[0], copies.__getitem__)
            elif node.op == "get_attr":
                name = f"{region.name}_{node.name}"
                setattr(module, name, _named(body, str(node.target)))
                copies[node] = module.graph.get_attr(name)
            else:
                copies[node] = module.graph.node_copy(node, copies.__getitem__)
                copies[node].meta[_MARK] = mark
    for part in list(region.users):
        part.replace_all_uses_with(results[part.args[1]])
        module.graph.erase_node(part)
    module.graph.erase_node(region)


def close_region(graph: fx.Graph) -> dict[str, Any]:
    """Put the marked layers of a stage into a region again.

    Args:
        graph: of the stage; changed in place.

    Returns:
        The body of the region, by the name of the new ``get_attr`` node, if there is one.
    """
    inside = dict.fromkeys(node for node in graph.nodes if _MARK in node.meta)
    if not inside:
        return {}
    last = next(reversed(inside))
    target, options = last.meta[_MARK]
    taken = dict.fromkeys(n for node in inside for n in node.all_input_nodes if n not in inside)
    given = [node for node in inside if any(user not in inside for user in node.users)]
    body = fx.Graph()
    copies = {node: body.placeholder(node.name) for node in taken}
    for node in inside:
        copies[node] = body.node_copy(node, copies.__getitem__)
    body.output(tuple(copies[node] for node in given))
    with graph.inserting_after(last):
        attribute = graph.get_attr(_MARK)
    with graph.inserting_after(attribute):
        region = graph.call_function(target, (attribute, *taken), options)
    for number, node in reversed([*enumerate(given)]):
        with graph.inserting_after(region):
            part = graph.call_function(operator.getitem, (region, number))
        node.replace_all_uses_with(part, delete_user_cb=lambda user: user not in inside)
    for node in reversed(inside):
        graph.erase_node(node)
    return {_MARK: fx.GraphModule(nn.Module(), body)}


def has_region(graph: fx.Graph) -> bool:
    """Whether a part of a captured graph is, or was, a checkpointed region."""
    return any(is_region(node) or _MARK in node.meta for node in graph.nodes)


def is_region(node: fx.Node) -> bool:
    """Whether a node is a checkpointed region."""
    return higher_order_name(node.target) == "tag_activation_checkpoint"


def _named(module: nn.Module, name: str) -> Any:
    value: Any = module
    for part in name.split("."):
        value = getattr(value, part)
    return value
