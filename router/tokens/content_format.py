"""Whether a chat template prints a message's content as a string or goes through its parts.

Engines decide it by looking for a loop over the content in the template's syntax tree, and turn every message into the
form that they found. Their rule is followed here, names and blind spots included, because another answer would be
another prompt.
"""

from __future__ import annotations

from collections.abc import Iterator

from jinja2 import nodes


def wants_parts(tree: nodes.Template) -> bool:
    try:
        return next(_content_loops(tree), None) is not None
    except _Unexpected:
        return False


class _Unexpected(Exception):
    """A target that is no plain name: engines give up there, and take strings."""


def _name(node: nodes.Node) -> str:
    if not isinstance(node, nodes.Name):
        raise _Unexpected
    return node.name


def _reads(node: nodes.Node | None, variable: str, key: str | None = None) -> bool:
    """Whether this is `variable`, or `variable.key`, perhaps filtered, tested or sliced."""
    if isinstance(node, nodes.Filter | nodes.Test):
        return node.node is not None and _reads(node.node, variable, key)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _reads(node.node, variable, key)
    if key is None:
        return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == variable
    if isinstance(node, nodes.Getitem):
        return _reads_name(node.node, variable) and isinstance(node.arg, nodes.Const) and node.arg.value == key
    return isinstance(node, nodes.Getattr) and _reads_name(node.node, variable) and node.attr == key


def _reads_name(node: nodes.Node, variable: str) -> bool:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == variable


def _aliases(tree: nodes.Template, variable: str) -> list[str]:
    """`variable` and the names that it, or a part of it, is assigned to, and those of these."""
    found = [variable]
    for known in found:  # grows while we go
        for assignment in tree.find_all(nodes.Assign):
            if _reads(assignment.node, known):
                name = _name(assignment.target)
                if name not in found:
                    found.append(name)
    return found


def _message_names(tree: nodes.Template) -> list[str]:
    lists = _aliases(tree, "messages")
    return [_name(loop.target) for loop in tree.find_all(nodes.For) if any(_reads(loop.iter, name) for name in lists)]


def _content_loops(tree: nodes.Template) -> Iterator[nodes.For]:
    messages = _message_names(tree)
    in_macros: set[int] = set()
    parameters: dict[int, set[str]] = {}  # of the macro around a loop: those that some call gives a content to
    for macro in tree.find_all(nodes.Macro):
        given = _content_parameters(tree, macro, messages)
        for loop in macro.find_all(nodes.For):
            in_macros.add(id(loop))
            if given:
                parameters[id(loop)] = given
    for loop in tree.find_all(nodes.For):
        iterated = loop.iter
        named = iterated.name if isinstance(iterated, nodes.Name) else None
        if (
            any(_reads(iterated, name, "content") for name in messages)
            or (named is not None and named in parameters.get(id(loop), ()))
            or (named == "content" and id(loop) not in in_macros)
        ):
            _name(loop.target)
            yield loop


def _content_parameters(tree: nodes.Template, macro: nodes.Macro, messages: list[str]) -> set[str]:
    names = [argument.name for argument in macro.args]
    given: set[str] = set()
    for call in tree.find_all(nodes.Call):
        if not isinstance(call.node, nodes.Name) or call.node.name != macro.name:
            continue
        pairs = [*zip(names, call.args, strict=False), *((keyword.key, keyword.value) for keyword in call.kwargs)]
        given |= {name for name, value in pairs if name in names and any(_reads(value, m, "content") for m in messages)}
    return given
