"""A rank computes norm and update from its own parts: the bits of torch over DTensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from rank_pool import Ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardwise.training.grad_norm import total_norm
from shardwise.training.optim import ShardAdamW

pytestmark = pytest.mark.dist
# On four ranks the first is uneven, and the last leaves some ranks nothing.
SHAPES = [(10, 3), (8, 5), (7,), (1,)]
PLACES = {1: [Shard(0)], 2: [Replicate(), Shard(0)]}


def trained(
    cls: type[torch.optim.AdamW], norm: Callable[..., Tensor], mesh_shape: Sequence[int]
) -> list[Tensor]:
    """Three updates over a mesh: the norms, then this rank's parts of weights and moments."""
    mesh = init_device_mesh("cpu", tuple(mesh_shape))
    generator = torch.Generator().manual_seed(0)

    def made(shape: Sequence[int]) -> DTensor:
        whole = torch.randn(*shape, generator=generator)
        return distribute_tensor(whole, mesh, PLACES[len(mesh_shape)])

    params = [nn.Parameter(made(shape)) for shape in SHAPES]
    optimizer = cls(params, lr=0.1, fused=True)
    norms: list[Tensor] = []
    for _ in range(3):
        for param, shape in zip(params, SHAPES, strict=True):
            param.grad = made(shape)
        norms.append(norm([param.grad for param in params]))
        optimizer.step()
    state = [optimizer.state[param] for param in params]
    kept = [*params, *(each[name] for each in state for name in ("exp_avg", "exp_avg_sq", "step"))]
    return [*norms, *(each.to_local() if isinstance(each, DTensor) else each for each in kept)]


def by_torch(grads: Sequence[Tensor]) -> Tensor:
    norm = torch.nn.utils.get_total_norm(grads)
    assert isinstance(norm, DTensor)
    return norm.full_tensor()


def differences(mesh_shape: Sequence[int]) -> list[int]:
    """The numbers of those tensors that are not the same."""
    ours = trained(ShardAdamW, total_norm, mesh_shape)
    theirs = trained(torch.optim.AdamW, by_torch, mesh_shape)
    pairs = zip(ours, theirs, strict=True)
    return [number for number, pair in enumerate(pairs) if not torch.equal(*pair)]


@pytest.mark.parametrize(("world", "mesh_shape"), [(2, [2]), (2, [2, 1]), (4, [4]), (4, [2, 2])])
def test_own_parts_give_the_bits_of_dtensors(
    ranks: Callable[[int], Ranks], world: int, mesh_shape: list[int]
) -> None:
    assert ranks(world).run(differences, mesh_shape) == [[]] * world
