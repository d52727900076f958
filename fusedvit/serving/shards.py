"""How the shards of a tower's parameters, one on each rank, are joined into whole parameters."""

from typing import NamedTuple

import torch
from torch import nn


class Shard(NamedTuple):
    """How the shards of one parameter are joined.

    Attributes:
        name: the parameter's name.
        dim: the dimension along which it is cut; None where every rank has all of it.
        parts: rows of each merged output (q, k and v; gate and up) in a rank's shard, if it is cut along its rows.
    """

    name: str
    dim: int | None
    parts: tuple[int, ...]

    def join_(self, whole: torch.Tensor, shards: torch.Tensor) -> None:
        """Copies the ranks' shards, `[size, *shard]`, into `whole`, without rows that only pad an embedding table."""
        size = len(shards)
        for rank, shard in enumerate(shards):
            if self.dim:
                whole.narrow(self.dim, rank * shard.shape[self.dim], shard.shape[self.dim]).copy_(shard)
                continue
            begin = 0
            for rows in self.parts:
                first = begin * size + rank * rows
                into = whole[first : first + rows]
                into.copy_(shard[begin : begin + rows][: len(into)])
                begin += rows


def sharding_of(sharded: nn.Module, whole: nn.Module, size: int) -> tuple[Shard, ...]:
    """How the shards of each of a tower's parameters are joined.

    Raises:
        ValueError: a parameter is cut in another way than engines cut linear layers and embeddings.
    """
    mine, theirs = dict(sharded.named_parameters()), dict(whole.named_parameters())
    if mine.keys() != theirs.keys():
        raise ValueError(f"parameter {min(mine.keys() ^ theirs.keys())} is in one of a sharded and a whole tower only")
    return tuple(_shard_of(name, sharded, tuple(mine[name].shape), tuple(theirs[name].shape), size) for name in mine)


def _shard_of(name: str, tower: nn.Module, shard: tuple[int, ...], whole: tuple[int, ...], size: int) -> Shard:
    if shard == whole:
        return Shard(name, None, ())
    layer = tower.get_submodule(name.rpartition(".")[0])
    cut = [dim for dim, (got, all_of_it) in enumerate(zip(shard, whole, strict=False)) if got != all_of_it]
    dim = cut[0] if len(cut) == 1 and len(shard) == len(whole) else -1
    padded = hasattr(layer, "num_embeddings") and dim == 0 and shard[0] * size >= whole[0]
    if dim < 0 or (shard[dim] * size != whole[dim] and not padded):
        raise ValueError(f"parameter {name} is {[*shard]} of {[*whole]} on each of {size} GPUs")
    parts = tuple(getattr(layer, "output_partition_sizes", ())) if dim == 0 else ()
    return Shard(name, dim, parts if sum(parts) == shard[0] else shard[:1])
