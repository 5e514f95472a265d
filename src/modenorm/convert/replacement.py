"""A module that replaces another: its hooks, and its places in the model."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

__all__ = ["put_in_place", "take_hooks"]

HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def take_hooks(old: Any, new: nn.Module) -> None:
    """The same dicts, so that a hook's handle still removes it; lazy norms have their own.

    Hooks that the new module has already come after those of the old one.
    """
    lazy = isinstance(old, LazyModuleMixin)
    own = {old._initialize_hook.id, old._load_hook.id} if lazy else set()
    for name in HOOKS:
        hooks = getattr(old, name)
        if lazy:
            getattr(new, name).update({key: h for key, h in hooks.items() if key not in own})
        else:
            hooks.update(getattr(new, name))
            setattr(new, name, hooks)
    if old._is_full_backward_hook is not None:
        new._is_full_backward_hook = old._is_full_backward_hook


def put_in_place(model: nn.Module, replaced: Mapping[nn.Module, nn.Module]) -> None:
    """Exchange modules wherever the model has them, also in plain lists, tuples and dicts."""
    _give_hooks(replaced.values())

    def goes(part: Any) -> bool:
        return isinstance(part, nn.Module) and part in replaced

    for parent in list(model.modules()):
        attributes = vars(parent)
        for name, value in list(attributes.items()):  # one is the dict of submodules
            if goes(value):
                attributes[name] = replaced[value]
            elif type(value) is tuple and any(map(goes, value)):
                attributes[name] = tuple(replaced[p] if goes(p) else p for p in value)
            elif isinstance(value, list | dict):
                places = value.items() if isinstance(value, dict) else enumerate(value)
                for place in [place for place, part in places if goes(part)]:
                    value[place] = replaced[value[place]]


def _give_hooks(modules: Iterable[nn.Module]) -> None:
    """Tell hooks that are kept with their module, as some are, that it is another one now."""
    for module in modules:
        hooks: Iterable[Any] = module._load_state_dict_pre_hooks.values()
        for hook in hooks:
            if getattr(hook, "with_module", False):
                hook.module = weakref.ref(module)
