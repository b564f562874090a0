"""Shard a policy over ranks, layer by layer, so that no rank needs memory for two copies of the model.

leader: loads the model into host memory           every rank: creates the same model without values
                 for each layer: allocate on the device, broadcast the leader's values, keep this rank's part
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from rollouts_core.backends.ranks import Ranks
from rollouts_core.config import ModelConfig, PolicyConfig
from rollouts_core.errors import ConfigError
from rollouts_core.model.policy import Policy, create_policy, find_kernel, loaded_kernel, use_kernel


def create_sharded_policy(
    model: ModelConfig, config: PolicyConfig, ranks: Ranks, **options: Any
) -> Policy:  # Any: the keywords of create_policy
    """Load a model as a policy that is sharded over all ranks. Every rank calls this function.

    Layers gather their weights in the dtype of matrix products. Other modules gather their weights unrounded. Except
    for the rounded weights of norms, the computation equals the computation of one process under autocast.
    """
    kernel = find_kernel(model, config, ranks.device.type)
    plain = config.model_copy(update={"compile": False, "attention": loaded_kernel(kernel)})
    source = create_policy(model, plain, device="cpu", **options) if ranks.is_leader else None
    ranks.begin()  # loading may take longer than the time limit of collective calls
    policy = create_policy(model, plain, device="meta", **options)
    use_kernel(policy.hf_model, kernel, ranks.device.type)
    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    in_layers = MixedPrecisionPolicy(
        param_dtype=policy.autocast_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    outside = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    for name, layer in find_layers(policy):
        _give_values(layer, source.get_submodule(name) if source else None, ranks.device)
        if config.compile:
            layer.compile()
        fully_shard(layer, mesh=mesh, mp_policy=in_layers)
    _give_values(policy, source, ranks.device)
    # Weights outside of layers stay gathered: each pass needs them first and last, and scoring reads the head's weight.
    fully_shard(policy, mesh=mesh, mp_policy=outside, reshard_after_forward=False)
    [policy.mixes_samples, *_] = ranks.gather(source is not None and source.mixes_samples)  # rank 0 is the leader
    if source is not None:  # settings from the model's files also go into checkpoints
        policy.hf_model.generation_config = source.hf_model.generation_config
        policy.start_sample = source.start_sample
    return policy


def find_layers(policy: Policy) -> list[tuple[str, nn.Module]]:
    """Find the transformer layers by name: the modules that transformers never splits between devices.

    Raises:
        ConfigError: the model's class does not declare its layers.
    """
    kinds = set(policy.hf_model._no_split_modules or ())
    layers = [(name, module) for name, module in policy.named_modules() if type(module).__name__ in kinds]
    if not layers:
        raise ConfigError(
            f"{type(policy.hf_model).__name__} does not declare its layers, so it cannot be sharded over processes: "
            "train it with one process"
        )
    return layers


@torch.no_grad()
def _give_values(module: nn.Module, source: nn.Module | None, device: torch.device) -> None:
    """Replace parameters and buffers on the meta device with tensors on `device` that have the leader's values.

    Args:
        source: the leader's module with values, or None on other ranks.
    """
    replaced: dict[nn.Parameter, nn.Parameter] = {}  # lets modules share the new parameter as they shared the old one
    for owner_name, owner in module.named_modules():
        values = _own_tensors(source.get_submodule(owner_name)) if source else {}
        for name, parameter in list(owner.named_parameters(recurse=False)):
            if not parameter.is_meta:
                continue
            if parameter not in replaced:
                received = _receive(parameter, values.get(name), device)
                replaced[parameter] = nn.Parameter(received, requires_grad=parameter.requires_grad)
            setattr(owner, name, replaced[parameter])
        for name, buffer in list(owner.named_buffers(recurse=False)):
            if buffer.is_meta:
                setattr(owner, name, _receive(buffer, values.get(name), device))


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of a module, without those of its submodules."""
    return {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}


def _receive(like: Tensor, value: Tensor | None, device: torch.device) -> Tensor:
    """Broadcast the leader's tensor, and return it on every rank. `value` is None on ranks other than the leader."""
    whole = torch.empty(like.shape, dtype=like.dtype, device=device)
    if value is not None:
        whole.copy_(value)
    dist.broadcast(whole, src=0)
    return whole
