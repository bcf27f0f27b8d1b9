"""The format that grouped matmuls of experts compute in: float8 where the user asks for it, and the
model, the GPU and the other settings are those that it is for."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.config.schema import RunConfig
from shardwise.errors import UserError
from shardwise.facts.cluster import ClusterSpec
from shardwise.facts.models import ModelSpec
from shardwise.plan.decisions import Choice
from shardwise.plan.expert import FAMILIES

_MULTIPLE = 16  # of both sides of a float8 matmul
_FIX = "leave precision.experts out"


def choose_experts(
    config: RunConfig, model: ModelSpec, cluster: ClusterSpec, *, param_dtype: str
) -> Choice[str]:
    """The format of experts; a `UserError` where float8 is asked for and cannot be."""
    if config.precision.experts == "param":
        why = "as param: float8 changes the numbers, so it is not chosen unless asked for"
        return Choice("param", why if model.num_experts > 1 else "the model has none", "rule")
    for what, why, fix in _bars(config, model, cluster, param_dtype):
        raise UserError(f"precision.experts=float8 {what}", why=why, fix=fix)
    why = "given; e4m3 with a power of two for each row of a factor, found anew each time, in all "
    why += "three grouped matmuls; router, shared experts and attention stay as they are"
    if cluster.device == "cpu":
        return Choice("float8", f"{why}; a CPU computes the rounded numbers in fp32", "user")
    return Choice("float8", f"{why}; not yet run on a GPU, so speed is a guess", "user")


def _bars(
    config: RunConfig, model: ModelSpec, cluster: ClusterSpec, param_dtype: str
) -> Iterator[tuple[str, str, str]]:
    """What forbids it: (what, why, fix)."""
    if model.num_experts == 1:
        yield f"changes nothing of {model.name}", "it has no experts", _FIX
    if model.model_type not in FAMILIES or config.model.trust_remote_code:
        known = f"experts were compared with plain ones for {', '.join(FAMILIES)}"
        yield f"does not suit {model.model_type} models", known, _FIX
    sides = {"hidden channels": model.hidden_size, "channels of an expert": model.ffn_size}
    for name, width in sides.items():
        if width % _MULTIPLE:
            why = f"its {width} {name} are no multiple of {_MULTIPLE}"
            yield f"does not suit {model.name}", why, _FIX
    if param_dtype == "fp16":
        why = "GPUs that compute float8 have bf16, which needs no loss scale"
        yield "does not work with precision.param=fp16", why, "write precision.param=bf16"
    if cluster.device == "cpu":
        return
    if cluster.gpu is None or not cluster.gpu.is_hopper:
        why = "torch's grouped matmul of float8 was written for Hopper: H100, H200, GH200"
        fix = f"{_FIX}, or choose such a GPU: cluster.name=NODESxGPUSxKIND"
        yield f"is not for {cluster.device_in_words}", why, fix
    if param_dtype != "bf16":
        why = "torch's grouped matmul of float8 gives bf16"
        yield f"does not work with precision.param={param_dtype}", why, "write precision.param=bf16"
    if config.train.kernels == "torch":
        why = "its casts are kernels of our own"
        yield "does not work with train.kernels=torch", why, "leave train.kernels out"
