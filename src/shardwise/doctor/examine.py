"""Which checks apply to what a user names, and what they found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.config.load import load_config
from shardwise.doctor.check import Finding, by_severity, find_faults
from shardwise.doctor.foreign.checks import FOREIGN
from shardwise.doctor.foreign.setup import read_setup
from shardwise.doctor.machine.gpu import read_gpus
from shardwise.doctor.machine.health import HEALTH
from shardwise.doctor.machine.node import Node, read_node
from shardwise.doctor.machine.nodes import NODES
from shardwise.doctor.registry import (
    NODE_CHECKS,
    PLAN_CHECKS,
    RUN_CHECKS,
    STATE_CHECKS,
    UNPLANNED,
    exit_code_of,
)
from shardwise.doctor.run.case import Case, read_case
from shardwise.doctor.signatures import SIGNATURES
from shardwise.doctor.signatures.log import Logs, read_log_file
from shardwise.doctor.slow.ranked import SLOW, rank_causes
from shardwise.errors import ExitCode, UserError
from shardwise.files import read_json
from shardwise.launch.prepare import choose_plan
from shardwise.plan.planned import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What was looked at, and the faults that were found."""

    findings: tuple[Finding, ...]
    num_checks: int
    notes: tuple[str, ...] = ()
    """What was left out, and why."""

    node: Node | None = None
    refused: UserError | None = None
    """Why there is no plan."""

    details: Mapping[str, Any] = field(default_factory=dict)
    """More for JSON, such as the causes of a slow run."""

    def count(self, level: str) -> int:
        """Findings of one level."""
        return sum(finding.check.level == level for finding in self.findings)

    def exit_code(self, *, strict: bool) -> ExitCode:
        """The code of the first error; with `strict` warnings count as errors."""
        if self.refused is not None:
            return self.refused.code
        bad = ("error", "warning") if strict else ("error",)
        found = (f.check for f in self.findings if f.check.level in bad)
        return next(map(exit_code_of, found), ExitCode.OK)


def examine_machine(environ: Mapping[str, str], plan: Plan | None = None) -> Diagnosis:
    """Look at this node, for a run that is to start on it or for any."""
    node = read_node(plan, environ)
    findings = find_faults(NODE_CHECKS, node)
    return Diagnosis(findings=tuple(by_severity(findings)), num_checks=len(NODE_CHECKS), node=node)


def look_before_start(environ: Mapping[str, str]) -> list[Finding]:
    """Errors and warnings of a node with GPUs on which ranks are about to start. Nothing is
    written."""
    if not read_gpus(environ):
        return []
    found = find_faults(STATE_CHECKS, read_node(None, environ, writes=False))
    return [finding for finding in by_severity(found) if finding.check.level != "note"]


def is_unfit(found: Sequence[Finding]) -> bool:
    """Whether the devices of a node are broken, and not only its settings."""
    return any(one.check in HEALTH and one.check.level == "error" for one in found)


def examine_config(file: Path, overrides: Sequence[str], environ: Mapping[str, str]) -> Diagnosis:
    """Look at a configuration, its plan, and this machine where it can be one of the cluster. A
    file of another tool, or a script, is looked at by itself."""
    if (setup := read_setup(file)) is not None:
        found = find_faults(FOREIGN, setup)
        return Diagnosis(findings=tuple(by_severity(found)), num_checks=len(FOREIGN))
    try:
        plan = choose_plan(load_config(str(file), list(overrides)), environ)
    except UserError as error:
        return Diagnosis(findings=(Finding(UNPLANNED, str(error)),), num_checks=1, refused=error)
    why = _why_elsewhere(plan, environ)
    of_plan = Diagnosis(
        findings=tuple(find_faults(PLAN_CHECKS, plan)),
        num_checks=len(PLAN_CHECKS),
        notes=() if why is None else (why,),
    )
    return joined(of_plan, *([] if why else [examine_machine(environ, plan)]))


def examine_run(run: Path, more_logs: Logs = ()) -> Diagnosis:
    """Look at what a run has left, and at logs from elsewhere."""
    return diagnose(read_case(run, more_logs))


def diagnose(case: Case) -> Diagnosis:
    """All checks of a run: its record, its logs, and its pace beside its plan."""
    causes = rank_causes(case)
    findings = [*find_faults(RUN_CHECKS, case), *find_faults(SIGNATURES, case.logs)]
    findings = by_severity([*(finding for finding, _ in causes), *findings])
    ranked = [{"id": finding.check.id, "share": lost.share} for finding, lost in causes]
    return Diagnosis(
        findings=tuple(findings),
        num_checks=len(RUN_CHECKS) + len(SIGNATURES) + len(SLOW),
        details={"causes": ranked},
    )


def examine_logs(paths: Sequence[Path]) -> Diagnosis:
    """Look for known lines in logs of any program."""
    found = find_faults(SIGNATURES, read_logs(paths))
    return Diagnosis(findings=tuple(by_severity(found)), num_checks=len(SIGNATURES))


def read_logs(paths: Sequence[Path]) -> Logs:
    """The ends of these files."""
    try:
        return [read_log_file(path) for path in paths]
    except OSError as error:
        raise UserError(
            f"{error.filename} cannot be read: {error.strerror}", fix=f"ls -l {error.filename}"
        ) from error


def examine_nodes(paths: Sequence[Path]) -> Diagnosis:
    """Compare nodes by what `shardwise doctor --json` wrote on each."""
    found = find_faults(NODES, [_told_node(path) for path in paths])
    return Diagnosis(findings=tuple(by_severity(found)), num_checks=len(NODES))


def _told_node(path: Path) -> Mapping[str, Any]:
    try:
        node = dict(read_json(path)["node"])
        tables = [*node["gpus"], *node["rdma"], node["environ"]]
        if not all(isinstance(each, dict) for each in tables) or {"host", "nccl"} - node.keys():
            raise ValueError("it lacks a part")
        _ = [port["rate"] for port in node["rdma"]]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"{path} is not what a node's doctor has said",
            why=str(error),
            fix="write it on each node: shardwise doctor --json > NODE.json",
        ) from error
    return node


def joined(*parts: Diagnosis) -> Diagnosis:
    """Several diagnoses as one."""
    return Diagnosis(
        findings=tuple(by_severity([finding for part in parts for finding in part.findings])),
        num_checks=sum(part.num_checks for part in parts),
        notes=tuple(note for part in parts for note in part.notes),
        node=next((part.node for part in parts if part.node is not None), None),
        refused=next((part.refused for part in parts if part.refused is not None), None),
        details={key: value for part in parts for key, value in part.details.items()},
    )


def _why_elsewhere(plan: Plan, environ: Mapping[str, str]) -> str | None:
    """Why this machine is not part of the plan's cluster; None where it may be."""
    from shardwise.facts.probe import probe_gpus

    if plan.cluster.device == "cpu" or probe_gpus(environ):
        return None
    return (
        f"this machine was not looked at: {plan.cluster.name} has GPUs, and nvidia-smi shows none "
        "here; ask again on a node of the cluster"
    )
