"""An extension of griffe: methods that a class takes from functions of other modules are its own.

`grad_norm = norms.grad_norm` in a class is an attribute without a docstring for whoever only reads
the source.
"""

import copy
from collections.abc import Iterator
from typing import Any

import griffe


class TakenMethods(griffe.Extension):
    def on_package(self, *, pkg: griffe.Module, loader: Any, **_: Any) -> None:
        for owner in classes_of(pkg):
            for name, member in list(owner.members.items()):
                function = function_of(member, loader.modules_collection)
                if function is not None:
                    own = copy.copy(function)
                    own.name, own.parent = name, owner
                    own.parameters = griffe.Parameters(*list(function.parameters)[1:])
                    owner.set_member(name, own)


def classes_of(item: griffe.Object) -> Iterator[griffe.Class]:
    """Yield the classes that a module and its parts define."""
    for member in list(item.members.values()):
        if member.is_alias:
            continue
        if member.is_class:
            yield member
        if member.is_class or member.is_module:
            yield from classes_of(member)


def function_of(
    member: griffe.Object | griffe.Alias, loaded: griffe.ModulesCollection
) -> griffe.Function | None:
    """Return the function that a class's attribute is; None if it is something else."""
    if member.is_alias or not member.is_attribute:
        return None
    value = member.value
    if not isinstance(value, griffe.ExprName | griffe.ExprAttribute):
        return None
    first, *rest = str(value).split(".")
    try:  # a method of the class may have the module's name, and is defined later
        found = loaded[".".join([member.module.resolve(first), *rest])]
        found = found.final_target if found.is_alias else found
    except (KeyError, griffe.NameResolutionError, griffe.AliasResolutionError):
        return None
    return found if found.is_function else None
