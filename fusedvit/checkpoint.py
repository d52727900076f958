"""Loads a checkpoint's vision tower: alone if its weights can be found by name, else inside the whole model.

The tower's class follows from the checkpoint's config, and its weights are found by their prefix. A tower that is
loaded alone needs no weights of the language model.
"""

import json
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from fusedvit.checks.find_tower import find_tower
from fusedvit.errors import InputError, UnsupportedModel, as_input_error, first_line, from_json
from fusedvit.families.base import Family
from fusedvit.families.registry import FAMILIES, family_of

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER = "adapter_config.json"  # from_pretrained also loads the adapter that it names
_PLAIN = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
Step = Callable[[str], None]  # called with a description of each step before it begins


def device_or_default(device: str | torch.device | None) -> torch.device:
    """The given device; for None, the GPU if there is one, else the CPU."""
    return torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def default_dtype(device: torch.device) -> torch.dtype:
    """The dtype in which a checkpoint's tower is loaded on `device` by default."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def load_tower(where: str, device: torch.device, dtype: torch.dtype, step: Step = lambda text: None) -> nn.Module:
    """Loads a checkpoint's tower, or the whole model if it cannot be loaded alone, in eval mode.

    Args:
        where: a folder or a hub name.
        step: called with a description of each step.

    Raises:
        InputError: the checkpoint does not exist, does not load, or lacks weights of the tower.
        UnsupportedModel: the checkpoint contains no tower that can be fused.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()  # `step` reports progress instead
    step("reading the checkpoint's config")
    config = _config_of(where)
    model = _tower_alone(where, config, dtype, step)
    if model is None:
        model = _whole_model(where, config, dtype, step)
    return model.eval().to(device)


def tower_config(where: str) -> tuple[Family, Any]:
    """Family and config of a checkpoint's tower; no weights are read. `where` may also be a config.json.

    Raises:
        InputError: the checkpoint does not exist, or transformers cannot read its config.
        UnsupportedModel: the config names no tower that can be fused.
    """
    path = Path(where)
    config = _config_of(str(path.parent) if path.name == "config.json" and path.is_file() else where)
    cls, own = next(_tower_classes(config), (None, None))
    family = None if cls is None else family_of(cls.__name__)
    if family is None:
        raise UnsupportedModel(f"{where}: {type(config).__name__} names no supported vision tower")
    return family, own


def _config_of(where: str) -> Any:
    from transformers import AutoConfig

    _check_folder(where)
    with as_input_error(f"{where}: no config that transformers reads"):  # it raises many types
        return AutoConfig.from_pretrained(where)


def _check_folder(where: str) -> None:
    """Raises InputError if `where` can be neither a folder with a checkpoint nor a hub name."""
    path = Path(where)
    if not where:
        raise InputError("a checkpoint's folder or hub name expected, got ''")
    if where.startswith(("http:/", "https:/")):
        raise InputError(f"{where}: a URL; give a folder or a hub name such as Qwen/Qwen3-VL-2B-Instruct")
    if path.is_file():
        raise InputError(f"{where}: a file; give the folder that holds config.json and the weights")
    if path.is_dir():
        if not _is_file(path / "config.json"):
            raise InputError(f"{where}: the folder holds no config.json")
        _check_readable(path / "config.json")
    elif where.startswith(("/", ".", "~")) or where.count("/") > 1:
        raise InputError(f"{where}: no such folder")


def _is_file(path: Path) -> bool:
    """Whether `path` is a file. Raises InputError if the system cannot tell, as in a folder without permission."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a NUL in its name
        return False
    except OSError as error:
        raise _unreadable(path, error) from None


def _check_readable(path: Path) -> None:
    """Raises InputError if a file cannot be opened. safetensors would say that the file does not exist, transformers
    that it is not a config."""
    try:
        path.open("rb").close()
    except OSError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: OSError) -> InputError:
    return InputError(f"{path}: cannot be read ({error.strerror})")


# ── the tower alone ───────────────────────────────────────────────────────────────────────────────────────────────────


def _tower_alone(where: str, config: Any, dtype: torch.dtype, step: Step) -> nn.Module | None:
    """The tower by itself. None if its class or its weights cannot be identified, or if loading takes more than reading
    the weights: they are quantised, the checkpoint has an adapter, or they do not match the config."""
    found = next(_tower_classes(config), None)
    if found is None or _file_of(where, ADAPTER) is not None:
        return None
    cls, tower_config = found
    with torch.device("meta"):
        empty = _empty(where, cls, tower_config)
    wanted, shards = set(empty.state_dict()), _shards_of(where)
    prefix = _prefix_of(wanted, shards)
    if prefix is None or any(_others(empty, wanted, prefix, shards)):
        return None
    step("loading the vision tower's weights")
    weights = _read_weights(where, {name: shards[prefix + name] for name in wanted}, prefix)
    if not all(weight.dtype in _PLAIN for weight in weights.values()):
        return None
    # through transformers, which computes buffers and chooses the attention implementation
    return _loaded(where, cls, None, config=tower_config, state_dict=weights, dtype=dtype)[0]


def _others(empty: nn.Module, wanted: set[str], prefix: str, shards: Iterable[str]) -> Iterator[str]:
    """Names of further tensors under the tower's prefix that the tower does not have, such as the scales of quantised
    weights or more blocks."""
    parts = {name.partition(".")[0] for name in wanted}
    buffers = {name for name, _ in empty.named_buffers()}  # some checkpoints have buffers that a tower computes itself
    ignored = getattr(empty, "_keys_to_ignore_on_load_unexpected", None) or ()
    for name in shards:
        own = name.removeprefix(prefix)
        inside = name.startswith(prefix) and (prefix or own.partition(".")[0] in parts)
        if inside and own not in wanted | buffers and not any(re.search(pattern, name) for pattern in ignored):
            yield name


def _tower_classes(config: Any) -> Iterator[tuple[Any, Any]]:
    """(class of a supported tower, its config) for `config` and every config inside it, at any depth."""
    from transformers import PreTrainedConfig

    name = type(config).__module__.replace(".configuration_", ".modeling_")
    if ".modeling_" in name:
        module = import_module(name)
        known = [getattr(module, n) for family in FAMILIES for n in family.class_names if hasattr(module, n)]
        yield from ((cls, config) for cls in known if cls.config_class is type(config))
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from _tower_classes(value)


def _shards_of(where: str) -> dict[str, str]:
    """Name of a tensor -> the file that holds it; empty for a checkpoint in another format than safetensors.

    If there is both a single file and an index, the single file is taken, as in transformers.
    """
    single = _file_of(where, SINGLE)
    if single is not None:
        with _opened(single) as file:
            return dict.fromkeys(file.keys(), SINGLE)
    index = _file_of(where, INDEX)
    if index is None:
        return {}
    try:
        return _weight_map(from_json(index.read_text(encoding="utf-8")))
    except OSError as error:
        raise _unreadable(index, error) from None
    except ValueError as error:
        raise InputError(f"{where}: {INDEX} is no index of weights: {first_line(error)}") from None


def _weight_map(document: Any) -> dict[str, str]:
    """The map from tensors to files in an index `document`. Raises ValueError if the index is malformed."""
    found = document.get("weight_map") if isinstance(document, dict) else document
    if not isinstance(document, dict) or not isinstance(found, dict):
        raise ValueError(f"an object with a weight_map of names to files expected, got {json.dumps(found)[:80]}")
    odd = next((name for name, file in found.items() if not isinstance(file, str)), None)
    if odd is not None:
        raise ValueError(f"weight_map: the name of a file expected for {odd}, got {json.dumps(found[odd])[:80]}")
    return found


def _prefix_of(wanted: set[str], shards: Mapping[str, str]) -> str | None:
    """The prefix of the tower's names in the checkpoint, if exactly one prefix has all of them; else None."""
    probe = min(wanted)
    prefixes = [name.removesuffix(probe) for name in shards if name == probe or name.endswith(f".{probe}")]
    whole = [prefix for prefix in prefixes if all(prefix + name in shards for name in wanted)]
    return whole[0] if len(whole) == 1 else None


def _read_weights(where: str, files: Mapping[str, str], prefix: str) -> dict[str, torch.Tensor]:
    """The tensors of `files` (name without prefix -> file), each file opened once."""
    weights: dict[str, torch.Tensor] = {}
    for shard in sorted(set(files.values())):
        path = _file_of(where, shard)
        if path is None:
            raise InputError(f"{where}: {shard}, which the index names, is missing")
        with _opened(path) as file:
            for name in (name for name, of in files.items() if of == shard):
                with as_input_error(str(path), SafetensorError):
                    weights[name] = file.get_tensor(prefix + name)
    return weights


def _file_of(where: str, name: str) -> Path | None:
    """A checkpoint's file, fetched from the hub if `where` is not a folder; None if the file does not exist."""
    from transformers.utils import cached_file

    folder = Path(where)
    if folder.is_dir():
        return folder / name if _is_file(folder / name) else None
    with as_input_error(where, OSError):
        found = cached_file(where, name, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)


def _opened(path: Path) -> Any:
    _check_readable(path)
    with as_input_error(f"{path}: no whole safetensors file", SafetensorError, OSError):
        return safe_open(path, framework="pt")


def _loaded(where: str, cls: Any, source: str | None, **arguments: Any) -> tuple[nn.Module, dict[str, Any]]:
    """A model from `cls.from_pretrained`, and transformers' loading info about its weights.

    Raises:
        InputError: the model does not load, or a tensor has another shape than the config says.
    """
    arguments |= {"output_loading_info": True, "ignore_mismatched_sizes": True}  # refused below, with a one-line error
    try:
        with _transformers_silent():
            model, found = cls.from_pretrained(source, **arguments)
    except Exception as error:  # damaged files and indices raise pickle's errors, EOFError, TypeError …
        told = isinstance(error, OSError | ValueError | RuntimeError | ImportError | SafetensorError)
        why = (
            first_line(error) if told else f"whole files of weights expected, got damaged ones ({type(error).__name__})"
        )
        raise InputError(f"{where}: {cls.__name__} does not load: {why}") from None
    for name, got, expected in sorted(found["mismatched_keys"]):
        raise InputError(f"{where}: {name} is {list(got)}, the config expects {list(expected)}")
    return model, found


@contextmanager
def _transformers_silent() -> Iterator[None]:
    """Silences transformers' tables of weights and its warnings; the caller raises an error for what matters."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(level)


# ── the whole model ───────────────────────────────────────────────────────────────────────────────────────────────────


def _whole_model(where: str, config: Any, dtype: torch.dtype, step: Step) -> nn.Module:
    """The whole model, of the class that its config names or, failing that, of the class that AutoModel maps."""
    cls = _model_class(where, config)
    with torch.device("meta"):
        find_tower(_empty(where, cls, config))  # raises UnsupportedModel before gigabytes are read
    step("loading the whole model")
    model, found = _loaded(where, cls, where, dtype=dtype)
    tower = find_tower(model)
    prefix = next(f"{name}." for name, module in model.named_modules() if module is tower)
    absent = sorted(name for name in found["missing_keys"] if name.startswith(prefix))
    if absent:  # transformers fills them with random numbers
        raise InputError(f"{where}: lacks {len(absent)} of the vision tower's weights, {absent[0]} among them")
    more = sorted(_others(tower, set(tower.state_dict()), prefix, found["unexpected_keys"]))
    if more:  # transformers leaves them out
        raise InputError(
            f"{where}: has {len(more)} weights that the config's vision tower has no place for, {more[0]} among them"
        )
    return model


def _model_class(where: str, config: Any) -> Any:
    import transformers

    names = getattr(config, "architectures", None) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InputError(f"{where}: config.json: architectures: a list of names expected, got {str(names)[:80]}")
    for name in names:
        found = getattr(transformers, name, None)
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found
    for auto in (transformers.AutoModelForImageTextToText, transformers.AutoModel):
        if type(config) in auto._model_mapping:
            mapped = auto._model_mapping[type(config)]
            return mapped[0] if isinstance(mapped, tuple | list) else mapped
    raise InputError(f"{where}: transformers has no class for {names or type(config).__name__}")


def _empty(where: str, cls: Any, config: Any) -> nn.Module:
    with as_input_error(f"{where}: {cls.__name__} cannot be built from its config"):  # numbers that fit no model
        return cls._from_config(config)
