"""The identity of a rank: everything that must be the same on every node to train one model."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import torch

from shardwise.config.plain import config_to_dict
from shardwise.data.data_fingerprint import fingerprint_data, fingerprint_tokenizer
from shardwise.errors import ExitCode, UserError
from shardwise.facts.calibration import calibration_digest
from shardwise.facts.probe import probe_gpus
from shardwise.files import read_bytes, user_path
from shardwise.model.weight_fingerprint import fingerprint_weights
from shardwise.plan.planned import Plan
from shardwise.training.agree import Topic, Values
from shardwise.version import __version__

T = TypeVar("T")
_SAME_FILES = "give every node the same file and changes, data and model"
_SAME_SOFTWARE = "install the same packages on every node"
# The largest file of a model's own code.
_MAX_SOURCE_BYTES = 2**24
_HASH_LENGTH = hashlib.sha256().digest_size * 2
# Topics in the order in which they are reported. Content is no part of the configuration: paths may
# differ between nodes where the files are the same.
TOPICS = (
    Topic("settings", ExitCode.CONFIG, _SAME_FILES),
    Topic("model", ExitCode.CONFIG, _SAME_FILES),
    Topic("content", ExitCode.CONFIG, _SAME_FILES),
    Topic("versions", ExitCode.ENVIRONMENT, _SAME_SOFTWARE),
    Topic("environment", ExitCode.ENVIRONMENT, "set the same variables on every node, or none"),
    Topic("machine", ExitCode.ENVIRONMENT, "give all nodes the same GPUs and numbers of ranks"),
    Topic(
        "calibration",
        ExitCode.ENVIRONMENT,
        "use one calibration on all nodes: copy that of rank 0's node, or name a directory that "
        "all nodes share: export SHARDWISE_CACHE=DIR",
    ),
)
# Settings that are compared by content, or that belong to one host.
_NOT_COMPARED = ("runs_dir", "cluster.prices", "observe.prometheus_host")
_PATHS = ("model.weights_from", "adapter.weights_from", "data.path", "data.eval_path")
_NAMES_OR_PATHS = ("model.name", "data.tokenizer")
_PACKAGES = (
    *("transformers", "tokenizers", "safetensors", "numpy", "datasets"),
    *("torchao", "triton", "flash-attn-4", "quack-kernels"),
)
# Variables that change the computation or the communication, except those of one host: its network
# cards, files, directories and logs.
_VARIABLES = (
    *("NCCL_", "TORCH_NCCL_", "TORCH_COMPILE", "TORCHDYNAMO_", "TORCHINDUCTOR_", "PYTORCH_"),
    *("SHARDWISE_", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_"),
)
# Caches and `~` in paths follow from it.
_HOME = "HOME"
_OF_ONE_HOST = (
    *("IFNAME", "HCA", "_DIR", "_FILE", "_PATH", "DEBUG", "LOG", "TRACE", "TOPO", "HOSTID"),
    *("CACHE", "RENDEZVOUS", "HEARTBEATS", "LEASE", "AGENT", "_CHAOS"),
)


def identity_of(plan: Plan, environ: Mapping[str, str]) -> dict[str, Values]:
    """What this node was given, by topic. `plan` holds its settings and paths. Only the first rank
    of a node reads the node's files and hardware."""
    topics = {
        "settings": _settings(plan),
        "model": _model(plan),
        "versions": _versions(),
        "environment": _variables(environ),
    }
    if environ["LOCAL_RANK"] == "0":
        topics["machine"] = _machine(plan, environ)
        try:
            topics["calibration"] = {"calibration": _short(calibration_digest(plan.cluster))}
            topics["content"] = _content(plan)
        except OSError as error:
            raise UserError(
                f"{error.filename} cannot be read: {error.strerror}",
                fix=f"ls -l {error.filename}",
            ) from error
    return topics


def with_paths_of(own: Plan, sent: Plan) -> Plan:
    """The plan that was sent, with what may differ between nodes that agree: paths and hosts."""
    config = sent.config
    for path in (*_NOT_COMPARED, *_PATHS, *_NAMES_OR_PATHS):
        config = _with_value(config, path.split("."), attrgetter(path)(own.config))
    inputs = {name: own.choices[name] for name in ("weights", "tokenizer")}
    return replace(
        sent,
        config=config,
        model_dir=own.model_dir,
        weights_dir=own.weights_dir,
        choices={**sent.choices, **inputs},
    )


def _with_value(section: T, path: Sequence[str], value: Any) -> T:
    name, *rest = path
    inner = _with_value(getattr(section, name), rest, value) if rest else value
    return replace(section, **{name: inner})  # type: ignore[type-var]


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Values:
    """The leaves of nested mappings, by their dotted path; a list is a leaf."""
    flat: Values = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _settings(plan: Plan) -> Values:
    values = flatten(config_to_dict(plan.config))
    for name in _NOT_COMPARED:
        del values[name]
    if plan.config.train.epochs is not None:
        del values["train.steps"]  # the first rank's guess until the data was read
    for name in _PATHS:
        values[name] = None if values[name] is None else "a path"
    for name in _NAMES_OR_PATHS:
        if Path(values[name]).expanduser().is_dir():
            values[name] = "a directory"
    return values


def _model(plan: Plan) -> Values:
    """config.json with the overrides. Where the files were is no part of the model."""
    values = flatten(plan.hf_config, "config.json's ")
    return {name: value for name, value in values.items() if not name.endswith("_name_or_path")}


def _machine(plan: Plan, environ: Mapping[str, str]) -> Values:
    values: Values = {"ranks of the node": environ.get("LOCAL_WORLD_SIZE")}
    if plan.cluster.device == "cuda":
        values["GPUs"] = sorted({gpu.device_name for gpu in probe_gpus(environ)})
    return values


def _versions() -> Values:
    versions: Values = {name: _installed(name) for name in _PACKAGES}
    # As it names itself, with the CUDA that it was built for.
    versions["torch"] = str(torch.__version__)
    versions["Python"] = ".".join(platform.python_version_tuple()[:2])
    versions["shardwise"] = f"{__version__}, source {_own_source()[:12]}"
    return versions


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _own_source() -> str:
    """A hash of this package, which changes more often than its version."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


def _variables(environ: Mapping[str, str]) -> Values:
    return {
        name: value
        for name, value in environ.items()
        if name == _HOME
        or (name.startswith(_VARIABLES) and not any(word in name for word in _OF_ONE_HOST))
    }


def _content(plan: Plan) -> Values:
    """Fingerprints of the files that this node reads."""
    config = plan.config
    values = fingerprint_data(config.data)
    if plan.weights_dir is not None:
        values["weights"] = fingerprint_weights(Path(plan.weights_dir))
    if config.adapter.weights_from is not None:
        place = user_path(config.adapter.weights_from) / "adapter_model.safetensors"
        values["adapters"] = fingerprint_weights(place)
    tokenizer = _tokenizer_directory(plan)
    if tokenizer is not None and config.data.source != "synthetic":
        values["tokenizer"] = fingerprint_tokenizer(tokenizer)
    if plan.model_dir is not None and config.model.trust_remote_code:
        values["Python code of model.name"] = _source_of(Path(plan.model_dir))
    return {name: _short(value) for name, value in values.items()}


def _tokenizer_directory(plan: Plan) -> Path | None:
    if plan.config.data.tokenizer == "auto":
        return None if plan.model_dir is None else Path(plan.model_dir)
    directory = Path(plan.config.data.tokenizer).expanduser()
    return directory if directory.is_dir() else None


def _source_of(directory: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(directory.glob("*.py")):
        digest.update(path.name.encode() + read_bytes(path, _MAX_SOURCE_BYTES))
    return digest.hexdigest()


def _short(value: Any) -> Any:
    """The beginning of a hash is enough to compare, for people too."""
    is_hash = isinstance(value, str) and len(value) == _HASH_LENGTH
    return f"sha256 {value[:16]}…" if is_hash else value
