"""A config as plain data: to JSON, to YAML, and back without pydantic."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, get_origin

import yaml

from shardwise.config.schema import RunConfig
from shardwise.config.schema_text import TOP_LEVEL, field_path, field_types, section_classes
from shardwise.config.trees import YamlDumper
from shardwise.errors import UserError


def config_to_dict(config: RunConfig) -> dict[str, Any]:
    """Plain mappings, lists and scalars, ready for json.dumps."""
    return _with_lists(asdict(config))


def config_from_dict(data: dict[str, Any]) -> RunConfig:
    """The inverse of config_to_dict. Workers call it on a saved plan, so it needs no pydantic."""
    values = {
        **{(TOP_LEVEL, name): data[name] for name in data if name not in section_classes()},
        **{
            (section, name): value
            for section in section_classes()
            for name, value in data.get(section, {}).items()
        },
    }
    if unknown := [key for key in values if key[1] not in field_types()[key[0]]]:
        raise UserError(
            f"the saved configuration has a field that does not exist: {field_path(*unknown[0])}",
            why="it was written by another version of shardwise",
            fix="make the plan again: shardwise plan FILE --json",
        )
    return assemble({key: _with_tuple(key, value) for key, value in values.items()})


def dump_yaml(config: RunConfig) -> str:
    """Every field of a config as YAML that load_config reads back to an equal config."""
    return yaml.dump(config_to_dict(config), Dumper=YamlDumper, sort_keys=False, allow_unicode=True)


def _with_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_lists(inner) for key, inner in value.items()}
    return [_with_lists(inner) for inner in value] if isinstance(value, list | tuple) else value


def _with_tuple(key: tuple[str, str], value: Any) -> Any:
    section, name = key
    return tuple(value) if get_origin(field_types()[section][name]) is tuple else value


def assemble(values: dict[tuple[str, str], Any]) -> RunConfig:
    """A config from flat values, `(section, field) -> value`."""
    by_section: dict[str, dict[str, Any]] = {section: {} for section in field_types()}
    for (section, name), value in values.items():
        by_section[section][name] = value
    sections = {name: cls(**by_section[name]) for name, cls in section_classes().items()}
    return RunConfig(**by_section[TOP_LEVEL], **sections)
