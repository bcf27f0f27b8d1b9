"""Every causal language model of transformers, built on meta from its default config."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import nn

from shardwise.errors import UserError
from shardwise.model.blocks import UnitMap, find_units, iter_modules

# What transformers raises for families whose default config it cannot build itself.
CANNOT_BUILD = (
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    StrictDataclassError,
    TypeError,
    ValueError,
)


# Blocks of these share one transformer's weights, see the test at the end.
SHARE_WEIGHTS = (transformers.ZambaConfig, transformers.Zamba2Config)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    transformers.logging.set_verbosity(verbosity)


def build(config_class: type[Any]) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config_class())
    return model


def validate_units(model: nn.Module, units: UnitMap) -> None:
    assert len(units.units) >= 2
    assert len(units.blocks) >= 2
    total = sum(param.numel() for param in model.parameters())
    assert sum(unit.num_params for unit in units.units) + units.root_params == total
    assert units.root_params < total / 2
    owner: dict[int, str] = {}
    for unit in units.units:
        for module in iter_modules(model, unit):
            for param in module.parameters():
                assert owner.setdefault(id(param), unit.name) == unit.name


# With `make chaos` all of them.
EVERY = [8, pytest.param(1, marks=pytest.mark.long)]


@pytest.mark.parametrize("every", EVERY)
def test_every_family_has_units_or_the_named_error(every: int) -> None:
    families = list(transformers.MODEL_FOR_CAUSAL_LM_MAPPING)[::every]
    not_buildable, good, named, wrong = [], [], [], []
    for config_class in families:
        name = config_class.__name__
        try:
            model = build(config_class)
        except CANNOT_BUILD as error:
            not_buildable.append(f"{name} ({type(error).__name__})")
            continue
        try:
            units = find_units(model)
            if config_class not in SHARE_WEIGHTS:
                validate_units(model, units)
            good.append(name)
        except UserError as error:
            named.append(name)
            assert "shard.unit_classes" in error.fix
        except AssertionError as error:
            wrong.append(f"{name}: {error}")
    print(
        f"{len(families)} families: {len(good) + len(named) + len(wrong)} built, "
        f"{len(good)} with units, {len(named)} with the named error {named}; "
        f"{len(not_buildable)} not buildable from their default config: "
        f"{', '.join(not_buildable)}"
    )
    assert not wrong
    # Which families build from their default config is up to each release of transformers.
    assert len(not_buildable) <= 0.2 * len(families)
    assert len(good) >= 0.95 * (len(families) - len(not_buildable))


def test_units_come_in_forward_order() -> None:
    model = build(transformers.LlamaConfig)
    places = {name: place for place, (name, _) in enumerate(model.named_modules())}
    order = [places[unit.modules[0]] for unit in find_units(model).units]
    assert all(first < second for first, second in pairwise(order))


@pytest.mark.parametrize("config_class", SHARE_WEIGHTS)
def test_blocks_that_share_weights_are_one_unit_or_refused(config_class: type[Any]) -> None:
    model = build(config_class)
    try:
        units = find_units(model)
    except UserError:
        return
    validate_units(model, units)
