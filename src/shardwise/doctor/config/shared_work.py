"""Axes along which ranks share work: links that are too slow for them, and windows that they cut
too short."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.doctor.check import Check
from shardwise.plan.planned import Plan

_MUCH_TIME = 0.10


def _tensor_off_nvlink(plan: Plan) -> Iterator[str]:
    cluster, ranks = plan.cluster, plan.decided.tensor
    if cluster.gpu is None or ranks == 1:
        return
    joined = min(cluster.nvlink_domain, cluster.gpu.nvlink_domain)
    if ranks > joined:
        link = "none" if joined == 1 else f"{joined}"
        yield f"mesh.tensor={ranks}, and NVLink joins {link} of the {cluster.gpu.name}s"


def _experts_off_nvlink(plan: Plan) -> Iterator[str]:
    ranks, forecast = plan.decided.expert, plan.forecast
    if forecast is None or ranks <= plan.cluster.nvlink_domain:
        return
    share = forecast.terms["expert_parallel"] / forecast.step_s
    if share > _MUCH_TIME:
        yield (
            f"mesh.expert={ranks} spans {-(-ranks // plan.cluster.nvlink_domain)} domains, and "
            f"tokens are expected to travel for {share:.0%} of a step"
        )


def _windows_beyond_chunks(plan: Plan) -> Iterator[str]:
    decided, model = plan.decided, plan.model
    if decided.context == 1:
        return
    chunk = decided.seq_len // (2 * decided.context)
    counted = {each.window for kind in model.kinds for each in kind.work.attentions}
    windows = {each for each in (*counted, model.attention_window) if each is not None}
    cut = [each for each in sorted(windows) if chunk < each - 1 < decided.seq_len - 1]
    if cut:
        yield f"a window of {cut[-1]} tokens, and chunks of {chunk} with context={decided.context}"


SHARED_WORK: tuple[Check[Plan], ...] = (
    Check(
        "SW109", "warning", "Blocks are divided over ranks without NVLink between them",
        "Every block gathers and sums its activations four times, and nothing hides that.",
        "write a mesh.tensor that NVLink joins, or mesh.tensor=1",
        _tensor_off_nvlink,
    ),
    Check(
        "SW110", "warning", "Tokens travel to experts over slow links",
        "Every token crosses the network to its experts and back, in forward and in backward.",
        "write a mesh.expert that one NVLink domain holds, or mesh.expert=auto",
        _experts_off_nvlink,
    ),
    Check(
        "SW111", "note", "Chunks of sequences are shorter than a window",
        "Ranks then gather the keys and values of whole sequences, where the ends of chunks would "
        "be enough.",
        "write a smaller mesh.context, or a larger data.seq_len",
        _windows_beyond_chunks,
    ),
)  # fmt: skip
