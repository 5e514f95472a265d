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

    def exchanged(part: Any) -> Any:
        return replaced.get(part, part) if isinstance(part, nn.Module) else part

    for parent in list(model.modules()):
        attributes = vars(parent)
        for name, value in list(attributes.items()):
            if isinstance(value, list):
                value[:] = map(exchanged, value)
            elif isinstance(value, dict):  # one of them, maybe an OrderedDict, has the submodules
                value.update({key: exchanged(part) for key, part in value.items()})
            else:
                several = type(value) is tuple
                attributes[name] = tuple(map(exchanged, value)) if several else exchanged(value)


def _give_hooks(modules: Iterable[nn.Module]) -> None:
    """Tell hooks that are kept with their module, as some are, that it is another one now."""
    for module in modules:
        hooks: Iterable[Any] = module._load_state_dict_pre_hooks.values()
        for hook in hooks:
            if getattr(hook, "with_module", False):
                hook.module = weakref.ref(module)
