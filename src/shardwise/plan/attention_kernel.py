"""Which attention is planned: the fastest that is exact for the model, the GPU and what is
installed."""

from __future__ import annotations

from shardwise.config.schema import RunConfig
from shardwise.errors import UserError
from shardwise.facts.block_work import Attention
from shardwise.facts.cluster import ClusterSpec
from shardwise.facts.installed import has_flash_attention
from shardwise.facts.models import ModelSpec
from shardwise.plan.decisions import Choice
from shardwise.plan.given import decide


def choose_attention(
    config: RunConfig, model: ModelSpec, cluster: ClusterSpec, *, param_dtype: str, compiled: bool
) -> Choice[str]:
    """The user's attention, or the fastest."""
    first = model.attentions[0]
    if config.model.attention not in ("auto", *model.attentions):
        raise UserError(
            f"{model.model_type} models do not have model.attention={config.model.attention}",
            why=f"their class in transformers has {', '.join(model.attentions)}",
            fix=f"leave model.attention out, or set model.attention={first}",
        )
    on_gpu = cluster.device == "cuda"
    if config.model.attention == "flex_attention" and on_gpu and not compiled:
        raise UserError(
            "model.attention=flex_attention needs torch.compile, and memory.compile is off",
            why="without the compiler it computes all pairs of tokens",
            fix="write memory.compile=true, or leave model.attention out",
        )
    needs = _needs(model, config.data.seq_len)
    if _takes_flash(config, model, cluster, param_dtype):
        why = f"flash-attn-4 is installed, and is the fastest on {cluster.device_name}"
        return decide(config, "attention", "flash_attention_4", why)
    if on_gpu and compiled and needs and _is_opaque(model):
        why = f"blocks have {needs}, for which sdpa would read a mask of all pairs of tokens"
        return decide(config, "attention", "flex_attention", why)
    why = "torch picks the fastest kernel of the device"
    if first != "sdpa":
        why = f"transformers' {model.model_type} class has no sdpa"
    elif config.data.keeps_documents_apart:
        why = (
            "runs everywhere; it builds a mask of documents, which flash_attention_4 does not need"
        )
    return decide(config, "attention", first, why)


def _takes_flash(
    config: RunConfig, model: ModelSpec, cluster: ClusterSpec, param_dtype: str
) -> bool:
    # FlashAttention 4 was measured on these GPUs here.
    is_hopper = cluster.gpu is not None and cluster.gpu.is_hopper
    # Its backward adds up in an order that changes from run to run.
    may_vary = not config.train.deterministic
    is_exact = _is_opaque(model) and "flash_attention_4" in model.attentions
    wide = param_dtype == "fp32"
    return is_hopper and may_vary and is_exact and not wide and has_flash_attention()


def _is_opaque(model: ModelSpec) -> bool:
    """Whether the family hands the mask on as it is, and wants a causal mask, a window, a cap and
    sinks at most."""
    attentions = _attentions(model)
    plain = all(not each.other_mask for each in attentions)
    is_known = model.source == "config.json" or bool(attentions)
    has_tiles = "flex_attention" in model.attentions
    return has_tiles and is_known and plain and not model.attention_dropout


def _attentions(model: ModelSpec) -> list[Attention]:
    """What all kinds of blocks ask of attention."""
    return [each for kind in model.kinds for each in kind.work.attentions]


def _needs(model: ModelSpec, seq_len: int) -> str:
    """What blocks have besides a causal mask, in words."""
    attentions = _attentions(model)
    windows = {each.window for each in attentions} | {model.attention_window}
    short = sorted(window for window in windows if window is not None and window < seq_len)
    found = [f"a window of {window} tokens" for window in short]
    found += ["soft caps"] * any(each.softcap for each in attentions)
    found += ["sinks"] * any(each.sinks for each in attentions)
    return " and ".join(found)
