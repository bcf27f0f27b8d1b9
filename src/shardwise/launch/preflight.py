"""Everything that can be checked before a rank starts and before a weight is read.

All problems are shown at once. Each check has one subject and is cheap: it reads headers, not
tensors, and the first record, not the data.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from shardwise.council.lines import parse_address
from shardwise.data.has_text import validate_conversations, validate_text
from shardwise.data.splits import validate_vocabulary
from shardwise.data.tokenizer import load_tokenizer
from shardwise.errors import ExitCode, UserError
from shardwise.facts.counted import keep_spec, kept_spec
from shardwise.facts.quantization import read_quantization
from shardwise.facts.weight_files import check_weight_files
from shardwise.files import user_path, why_no_path
from shardwise.launch.disk_room import validate_free_space
from shardwise.launch.prepare import validate_sinks
from shardwise.metrics.callbacks import load_callback
from shardwise.plan.float8_rules import validate_torchao
from shardwise.plan.inputs import check_bytes, warn_of_vocabulary
from shardwise.plan.planned import Plan

# A problem that would stop the run, or the text of a warning.
Finding = UserError | str
Check = Callable[[Plan], list[Finding]]

# The longest name of a file that a run makes in its directory.
_LONGEST_PATH = "checkpoints/quarantined-step-00000000.10/rank-00000.bin"


def validate_run(plan: Plan) -> list[str]:
    """Raise one error for everything that would stop the run on this machine. Returns warnings."""
    findings = [finding for check in CHECKS for finding in check(plan)]
    problems = [finding for finding in findings if isinstance(finding, UserError)]
    if problems:
        raise _as_one(problems)
    return [finding for finding in findings if isinstance(finding, str)]


def check_data(plan: Plan) -> list[Finding]:
    """Whether there is text where `data.path` and `data.field` say."""
    return _found_by(lambda: validate_text(plan.config.data))


def check_model(plan: Plan) -> list[Finding]:
    """Whether transformers builds the model, where no test has and nothing was counted of it: the
    sizes of known families are computed, so nobody has read the rest of their config.json. It
    imports transformers, so what was built once is kept."""
    is_shipped = plan.model_dir is None and not plan.config.model.overrides
    if is_shipped or plan.model.source == "counted":
        return []
    key = {"built": plan.hf_config}
    if kept_spec(plan.model.name, key) is not None:
        return []
    found = _found_by(lambda: _validate_model(plan))
    if not found:
        keep_spec(plan.model, key)
    return found


def _validate_model(plan: Plan) -> None:
    from shardwise.model.build import build_on_meta

    code_dir = plan.model_dir if plan.config.model.trust_remote_code else None
    build_on_meta(plan.hf_config, attention="eager", code_dir=code_dir)


def check_weights(plan: Plan) -> list[Finding]:
    """Whether the files of the first weights are whole, and not quantised in a way that is not
    read."""
    # Checkpoints of adapters do not hold the weights that they were trained over.
    is_resumed = _has_checkpoints(plan) and plan.decided.adapter == "none"
    if plan.weights_dir is None or is_resumed:
        return []
    place = Path(plan.weights_dir)
    directory = place if place.is_dir() else place.parent
    return [*check_weight_files(place), *_found_by(lambda: read_quantization(directory))]


def check_adapter(plan: Plan) -> list[Finding]:
    """Whether the adapters that training begins with are those of the configuration."""
    adapter = plan.config.adapter
    if adapter.weights_from is None or _has_checkpoints(plan):
        return []
    place = user_path(adapter.weights_from)
    return _found_by(lambda: _validate_adapter(plan, place))


def _validate_adapter(plan: Plan, place: Path) -> None:
    import torch

    from shardwise.model.build import build_on_meta
    from shardwise.model.lora import apply_lora
    from shardwise.model.peft_format import validate_peft

    code_dir = plan.model_dir if plan.config.model.trust_remote_code else None
    model = build_on_meta(plan.hf_config, attention="eager", code_dir=code_dir)
    apply_lora(model, plan.config.adapter, torch.float32)
    validate_peft(place, plan.config.adapter, model)


def check_tokenizer(plan: Plan) -> list[Finding]:
    """Whether there is a tokenizer, the model has rows for its tokens, and it renders the first
    conversation."""
    if plan.decided.tokenizer == "none":
        return []
    if unwanted := check_bytes(plan):
        return [*unwanted]
    config, model = plan.config.data, plan.config.model
    try:
        tokenizer = load_tokenizer(config.tokenizer, model.name, revision=model.revision)
        validate_vocabulary(tokenizer, plan.model.vocab_size)
        if config.format != "text":
            validate_conversations(config, tokenizer)
    except UserError as error:
        return [error]
    pretrained = plan.weights_dir is not None
    return [*warn_of_vocabulary(plan.model, tokenizer.vocab_size, pretrained=pretrained)]


def check_split(plan: Plan) -> list[Finding]:
    """Whether ranks can divide the sequences of this family."""
    if plan.decided.context == 1:
        return []
    return _found_by(lambda: _validate_split(plan))


def _validate_split(plan: Plan) -> None:
    from shardwise.model.split_trial import validate_split

    code_dir = plan.model_dir if plan.config.model.trust_remote_code else None
    validate_split(plan.decided.attention, plan.hf_config, code_dir=code_dir)


def check_attention(plan: Plan) -> list[Finding]:
    """Whether the package that an attention implementation needs is installed."""
    wanted, device = plan.decided.attention, plan.cluster.device
    if wanted in ("flash_attention_2", "flex_attention") and device == "cpu":
        why = "torch has no backward pass for it on a CPU" if wanted.startswith("flex") else ""
        return [_no_attention(f"model.attention={wanted} does not train on a CPU", why)]
    needs = {"flash_attention_2": "flash_attn.flash_attn_interface"}
    needs["flash_attention_4"] = "flash_attn.cute"
    if device == "cpu" or wanted not in needs or _is_installed(needs[wanted]):
        return []
    package = {"flash_attention_2": "flash-attn", "flash_attention_4": "'shardwise[flash4]'"}
    what = f"model.attention={wanted} needs a package that is not installed here"
    return [_no_attention(what, f"there is no {needs[wanted]}", f"pip install {package[wanted]}")]


def check_extras(plan: Plan) -> list[Finding]:
    """Whether the optional packages that settings ask for are installed."""
    return [
        *_found_by(lambda: validate_sinks(plan.config)),
        *_found_by(lambda: validate_torchao(plan.decided.linear)),
    ]


def check_callbacks(plan: Plan) -> list[Finding]:
    """Whether the user's own functions can be imported."""
    names = plan.config.observe.callbacks
    return [found for name in names for found in _found_by(partial(load_callback, name))]


def check_run_directory(plan: Plan) -> list[Finding]:
    """Whether files can be created, written and renamed in the run directory, and checkpoints
    have room."""
    run_dir = plan.run_dir
    why = why_no_path(str(run_dir / _LONGEST_PATH))
    if why is None:
        try:
            _try_to_write(next(path for path in (run_dir, *run_dir.parents) if path.exists()))
        except OSError as error:
            why = f"{error.strerror or error}: {error.filename or run_dir}"
    if why is None:
        return _found_by(lambda: validate_free_space(plan))
    return [
        UserError(
            f"nothing can be written to the run directory {run_dir}",
            why=why,
            fix="name a directory that can be written to, such as runs_dir=/tmp/runs",
            code=ExitCode.ENVIRONMENT,
        )
    ]


def check_ports(plan: Plan) -> list[Finding]:
    """Whether the metrics' port is free. torchrun chooses the ranks' own port."""
    observe = plan.config.observe
    if observe.prometheus_port is None:
        return []
    try:
        # It binds as the endpoint does: a port on which a closed connection still lingers is free.
        socket.create_server(
            (observe.prometheus_host, observe.prometheus_port),
            family=socket.AF_INET6 if ":" in observe.prometheus_host else socket.AF_INET,
        ).close()
    except (OSError, ValueError) as error:
        where = f"{observe.prometheus_host}:{observe.prometheus_port}"
        return [
            UserError(
                f"the metrics cannot be served on {where}",
                why=getattr(error, "strerror", None) or str(error),
                fix="write another observe.prometheus_port or observe.prometheus_host, or "
                "observe.prometheus_port=null",
                code=ExitCode.ENVIRONMENT,
            )
        ]
    return []


# In the order in which they are shown.
def check_meeting(plan: Plan) -> list[Finding]:
    """Whether the place where sites meet has an address. It may still come to life."""
    meet = plan.config.diloco.meet
    if meet is None:
        return []
    host, port = parse_address(meet)
    try:
        socket.getaddrinfo(host, port)
    except OSError as error:
        return [
            UserError(
                f"diloco.meet={meet}: this machine knows no host {host}",
                why=f"{error.strerror or error}",
                fix="write the name or the address of the machine where `shardwise sites` runs, "
                "such as diloco.meet=10.0.0.1:29700",
                code=ExitCode.ENVIRONMENT,
            )
        ]
    return []


CHECKS: tuple[Check, ...] = (
    check_data,
    check_tokenizer,
    check_model,
    check_weights,
    check_adapter,
    check_attention,
    check_split,
    check_extras,
    check_callbacks,
    check_run_directory,
    check_ports,
    check_meeting,
)


def _try_to_write(directory: Path) -> None:
    """Write under a name of its own, so that other nodes and a running job are not disturbed."""
    with tempfile.TemporaryDirectory(prefix=".preflight-", dir=directory) as scratch:
        file = Path(scratch) / "file"
        with file.open("wb") as stream:
            stream.write(b"shardwise")
            stream.flush()
            os.fsync(stream.fileno())
        file.rename(file.with_name("renamed"))


def _has_checkpoints(plan: Plan) -> bool:
    return any((plan.run_dir / "checkpoints").glob("step-*"))


def _is_installed(module: str) -> bool:
    package, _, _ = module.partition(".")
    return find_spec(package) is not None and find_spec(module) is not None


def _no_attention(what: str, why: str = "", install: str = "") -> UserError:
    fix = ", or ".join(filter(None, [install, "leave model.attention out"]))
    return UserError(what, why=why, fix=fix, code=ExitCode.ENVIRONMENT)


def _found_by(validate: Callable[[], object]) -> list[Finding]:
    try:
        validate()
    except UserError as error:
        return [error]
    return []


def _as_one(problems: list[UserError]) -> UserError:
    """One problem as it is, or several as a list, so that all can be mended in one go."""
    if len(problems) == 1:
        return problems[0]
    shown = [f"  {line}" for problem in problems for line in str(problem).splitlines()]
    lines = [f"{len(problems)} things would stop this run:", *shown]
    return UserError("\n".join(lines), code=problems[0].code)
