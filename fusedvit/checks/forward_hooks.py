"""Forward hooks on a tower's inner modules: which of them a fused call may leave out.

transformers installs two kinds itself: hooks that capture outputs, and hooks that mark embeddings for gradients.
"""

import sys
from collections.abc import Callable
from functools import lru_cache, partial
from itertools import repeat
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from fusedvit.checks.recorded import HOOKS
from fusedvit.checks.source_code import Definition, UnreadSource, definition_of

NEVER_CALLED = (nn.ModuleList, nn.ModuleDict)
_EMBEDDING = "patch_embed"  # the module of a tower that all of its outputs are computed from
_CAPTURING_HOOKS = "transformers.utils.output_capturing"  # installed lazily, idle unless hidden states are asked for
_MARKS_FOR_GRADIENTS = Definition(
    "transformers.modeling_utils", "PreTrainedModel.enable_input_require_grads.<locals>.make_inputs_require_grads"
)


def hooked(tower: nn.Module) -> str:
    """The path of the first inner module with a hook that would fire; "" if there is none."""
    embedding = hooks_on_embedding(tower)
    for path, module in tower.named_modules():
        called = path and not isinstance(module, NEVER_CALLED)
        if called and any(fires(getattr(module, name), embedding) for name in HOOKS):
            return path
    return ""


def fires(hooks: dict[int, Callable[..., Any]], embedding: dict[int, Any]) -> bool:
    """Whether this registry has a hook that is not one of transformers' idle hooks.

    Args:
        embedding: the registry of `hooks_on_embedding`.
    """
    return not all(map(_is_idle, hooks.values(), repeat(hooks is embedding)))


def hooks_on_embedding(tower: nn.Module) -> dict[int, Any]:
    """The registry of hooks that get the output of the tower's patch embedding; empty if no module has its name."""
    embedding = tower._modules.get(_EMBEDDING)
    return {} if embedding is None else embedding._forward_hooks


def marks_for_gradients(tower: nn.Module) -> bool:
    """Whether all outputs of a call of the original code would require gradients, though the tower may be frozen:
    `gradient_checkpointing_enable` marks the patch embedding's output for them."""
    records = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    try:
        return records and any(map(_is_mark, hooks_on_embedding(tower).values()))
    except UnreadSource:  # the tower cannot be judged either, and its original code runs
        return False


def _is_mark(hook: Callable[..., Any]) -> bool:
    return definition_of(hook) == _MARKS_FOR_GRADIENTS


def _is_idle(hook: Callable[..., Any], on_embedding: bool) -> bool:
    """Whether a fused call may leave `hook` out: it captures outputs that are not requested, or it marks embeddings for
    gradients (`gradient_checkpointing_enable`). Such a mark has no effect while gradients are off, and on the patch
    embedding the fused outputs get its effect (`outputs.gradients`)."""
    function = hook.func if type(hook) is partial else hook
    if getattr(function, "__module__", None) == _CAPTURING_HOOKS:  # any function may claim this, so its code is checked
        home = sys.modules.get(_CAPTURING_HOOKS)
        return type(function) is FunctionType and function.__code__ is _capturing_code(function, home)
    return (on_embedding or not torch.is_grad_enabled()) and _is_mark(hook)


@lru_cache(maxsize=256)
def _capturing_code(function: FunctionType, home: object) -> CodeType | None:
    """The code of `function`, if it is one of transformers' capturing hooks; cached, as each call needs it.

    Args:
        home: what is in `sys.modules` for these hooks now; only a part of the cache's key, so that what is found while
            another module stands there is not kept.
    """
    found = definition_of(function)
    return function.__code__ if found is not None and found.module == _CAPTURING_HOOKS else None
