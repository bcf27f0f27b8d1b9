"""Which losses the routers of a mixture of experts train with, and with which coefficients."""

from __future__ import annotations

from shardwise.config.schema import RunConfig
from shardwise.errors import UserError
from shardwise.facts.models import ModelSpec
from shardwise.plan.decisions import Choice

_OFF = "train.router_aux_loss=off"


def choose_router_aux_loss(config: RunConfig, model: ModelSpec) -> Choice[float]:
    """The coefficient; 0 means that there is no such loss."""
    given, asked = config.train.router_aux_loss, model.router_aux_loss
    if given == "off" or given == 0:
        return Choice(0.0, "given", "user")
    if given == "auto":
        if not asked:
            is_dense = model.num_experts == 1 and model.num_routers == 0
            why = "the model has no experts" if is_dense else "the model's config asks for none"
            return Choice(0.0, why, "rule")
        _validate_found(model, f"the config of {model.name} asks for a load-balancing loss", _OFF)
        return Choice(asked, "the model's config asks for it: output_router_logits", "rule")
    _validate_found(model, f"train.router_aux_loss={given} needs a mixture of experts", _OFF)
    instead = "" if asked is None or asked == given else f"; the model's config asks for {asked:g}"
    return Choice(float(given), f"given{instead}", "user")


def choose_router_z_loss(config: RunConfig, model: ModelSpec) -> Choice[float]:
    """The coefficient; 0 means that there is no such loss."""
    given = config.train.router_z_loss
    if not given:
        return Choice(0.0, "no config of transformers asks for it", "rule")
    what = f"train.router_z_loss={given} needs a mixture of experts"
    _validate_found(model, what, "train.router_z_loss=0")
    return Choice(given, "given", "user")


def left_out(model: ModelSpec, chosen: float) -> list[str]:
    """The warning where the user turns off the loss that the model's config asks for."""
    if not model.router_aux_loss or chosen:
        return []
    return [
        f"the model's config asks for a load-balancing loss (output_router_logits, "
        f"{model.router_aux_loss:g}); train.router_aux_loss leaves it out"
    ]


def _validate_found(model: ModelSpec, what: str, off: str) -> None:
    if model.num_routers == 0:
        raise UserError(
            f"{what}, which cannot be computed for {model.name}",
            why=model.why_no_routers,
            fix=f"write {off} to train without it",
        )
