"""Float8 in linear layers: what it needs, which layers it suits, and how weights are gathered."""

from __future__ import annotations

from importlib.util import find_spec

from shardwise.config.schema import FLOAT8_FORMATS, RunConfig
from shardwise.errors import ExitCode, UserError
from shardwise.facts.cluster import ClusterSpec
from shardwise.facts.models import ModelSpec
from shardwise.plan.decisions import FLOAT8_BASE, Choice

_MULTIPLE = 16  # of both sides of a float8 matmul
_OTHER_FORMATS = "write precision.linear=param, or leave precision.linear out"


def is_float8(linear: str) -> bool:
    """Whether a value of `precision.linear` means float8."""
    return linear in FLOAT8_FORMATS


def why_not_float8(in_features: int, out_features: int, least: int) -> str | None:
    """Why a linear layer of this shape stays as it is; None where float8 suits it.

    Casts move about six bytes for each of the `in + out` channels of a token, and float8 halves the
    time of `in x out` multiplications. By an H200's rates (700 and 1,488 TFLOP/s, 4.3 TB/s) the two
    are equal near 620 x 620.
    """
    shape = f"{in_features} x {out_features}"
    if in_features % _MULTIPLE or out_features % _MULTIPLE:
        return f"{shape} is no multiple of {_MULTIPLE}"
    if min(in_features, out_features) < least:
        return f"{shape} is below precision.float8_min_features={least}"
    return None


def choose_linear(config: RunConfig, model: ModelSpec, cluster: ClusterSpec) -> Choice[str]:
    """The format of linear layers: float8 only where the user asked for it and the device has
    it."""
    given = config.precision.linear
    if given == "param":
        return Choice("param", "given", "user")
    if config.adapter.base == "float8":
        return _choose_base(cluster)
    if given == "auto":
        why = "as param"
        if "fp8" in cluster.compute_formats:
            why = "as param: float8 changes the numbers, so it is not chosen unless asked for"
        return Choice("param", why, "rule")
    if "fp8" not in cluster.compute_formats:
        raise no_float8_here(given, cluster.device_in_words)
    return Choice(given, f"given; {_which_layers(config, model)}", "user")


def _choose_base(cluster: ClusterSpec) -> Choice[str]:
    """How layers multiply whose frozen weights are stored in float8."""
    if "fp8" not in cluster.compute_formats:
        why = f"{cluster.device_in_words} does not compute float8, so layers make floats of their "
        return Choice("param", f"{why}weights in each forward and backward", "rule")
    why = "frozen layers multiply as they are stored; inputs and gradients are cast with one scale "
    why += "a tensor, found anew each time; backward transposes a layer's bytes, because a second "
    why += "copy would be stored and gathered too; adapters multiply as param"
    return Choice(FLOAT8_BASE, why, "rule")


def choose_float8_gather(config: RunConfig, model: ModelSpec, shard: int) -> Choice[bool]:
    """Whether float8 weights are cast before they are gathered, and not after."""
    linear, group = config.precision.linear, config.shard.reshard_after_forward
    if not is_float8(linear):
        return Choice(False, "no weights are float8", "rule")
    if linear == "float8_rowwise":
        return Choice(
            False, "a scale for each column needs all rows, and a rank has only some", "rule"
        )
    if config.memory.offload == "cpu":
        return Choice(False, "the scales of weights in host memory are not known ahead", "rule")
    if not isinstance(group, bool | str):
        why = f"shard.reshard_after_forward={group} keeps shards that FSDP2 cannot cast"
        return Choice(False, why, "rule")
    if model.hidden_size % shard and model.ffn_size % shard:
        why = f"rows do not divide over {shard} ranks, and cast shards cannot be padded"
        return Choice(False, why, "rule")
    why = "one byte per weight; all scales in one pass after each step"
    return Choice(True, why, "rule")


def validate_torchao(linear: str) -> None:
    """Raise where float8 is asked for and torchao is not installed."""
    if is_float8(linear) and find_spec("torchao") is None:
        raise UserError(
            f"precision.linear={linear} needs torchao, which is not installed",
            fix=f"pip install 'shardwise[float8]', or {_OTHER_FORMATS}",
            code=ExitCode.ENVIRONMENT,
        )


def no_float8_here(linear: str, device_name: str) -> UserError:
    """The error for a device without float8 arithmetic."""
    return UserError(
        f"precision.linear={linear}, but {device_name} does not compute float8",
        why="GPUs do since compute capability 8.9: L4, L40S, RTX 40, H100, H200, B200 and later",
        fix=f"{_OTHER_FORMATS}, or choose such a GPU: cluster.name=NODESxGPUSxKIND",
    )


def no_layer_fits(linear: str, model_name: str, reasons: list[str], widest: int = 0) -> UserError:
    """The error for a model in which float8 suits no layer.

    `widest` is the least width at which a layer would be converted, where that is known.
    """
    narrower = f", or precision.float8_min_features={widest}" if widest else ""
    return UserError(
        f"precision.linear={linear} changes no layer of {model_name}",
        why="; ".join(reasons) or "its blocks have no linear layers",
        fix=f"{_OTHER_FORMATS}{narrower}",
    )


def _which_layers(config: RunConfig, model: ModelSpec) -> str:
    """The converted layers as far as config.json tells. A run prints the exact list."""
    shapes = _block_shapes(model)
    if shapes is None:
        return "the run prints which layers that changes"
    least = config.precision.float8_min_features
    whys = {name: why_not_float8(*shape, least) for name, shape in shapes.items()}
    left = {name: why for name, why in whys.items() if why}
    if len(left) == len(shapes):
        usable = (shape for shape in shapes.values() if why_not_float8(*shape, 1) is None)
        widest = max((min(shape) for shape in usable), default=0)
        reasons = sorted({*left.values()})
        raise no_layer_fits(config.precision.linear, model.name, reasons, widest)
    number = len(shapes) - len(left)
    parts = [f"{number * model.num_layers} linear layers, {number} in each block"]
    for why in dict.fromkeys(left.values()):
        names = " and ".join(name for name in left if left[name] == why)
        parts.append(f"not {names} ({why})")
    if model.num_experts > 1:
        parts.append("not the experts: they are one tensor; the forecast is that of param")
    return "; ".join([*parts, "head, norms and embedding stay as they are"])


def _block_shapes(model: ModelSpec) -> dict[str, tuple[int, int]] | None:
    """(in, out) of a block's linear layers; None for families whose blocks are not Llama's."""
    if model.source != "config.json" or model.model_type == "gpt2":
        return None
    hidden, ffn = model.hidden_size, model.ffn_size
    query, key = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    attention = {"q": (hidden, query), "k": (hidden, key), "v": (hidden, key), "o": (query, hidden)}
    if model.num_experts > 1:
        return attention
    return attention | {"gate": (hidden, ffn), "up": (hidden, ffn), "down": (ffn, hidden)}
