"""`shardwise compare`: is this throughput right? For runs of ours and of other stacks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli.named_run import (
    ConfigFile,
    GlobalBatch,
    GpuGbps,
    GpuGib,
    GpuTflops,
    MicroBatch,
    ModelName,
    Overrides,
    SeqLen,
    changes_of,
    changes_of_gpu,
    read_speed,
    split_words,
)
from shardwise.cli.show import show_table
from shardwise.config.load import load_config
from shardwise.errors import UserError
from shardwise.facts.cluster import ClusterSpec, in_usual_nodes, parse_cluster
from shardwise.facts.models import ModelSpec
from shardwise.units import GIB, format_bytes, format_count

if TYPE_CHECKING:
    from shardwise.compare.assessment import MemoryAnswer, SpeedAnswer
    from shardwise.compare.standing import Peer
    from shardwise.compare.stated import StatedRun

_WIDTH = 80
_PLAIN_STACK = "fsdp"
_AXES = ("--tp", "--pp", "--cp", "--ep")
_OTHERS = ("--precision", "--recompute", "--network", "--with")

MeasuredSpeed = Annotated[
    float | None,
    typer.Option(
        help="Measured tokens per second of one GPU, such as 10.7k.",
        parser=read_speed,
        metavar="NUMBER",
        show_default=False,
    ),
]
MeasuredGib = Annotated[
    float | None,
    typer.Option(min=0.001, help="Measured GiB of one GPU, for a file.", show_default=False),
]
Gpus = Annotated[str | None, typer.Option(help="The GPUs, such as 2x8xH100.", show_default=False)]
StackName = Annotated[
    str, typer.Option(help="What trains: megatron, torchtitan, nanotron, deepspeed, fsdp, …")
]
Precision = Annotated[str | None, typer.Option(help="bf16, fp16 or fp8.", show_default=False)]
Recompute = Annotated[str | None, typer.Option(help="none, selective or full.", show_default=False)]
NetworkCards = Annotated[
    str | None,
    typer.Option(help="A node's network cards, such as '8x400 Gb/s'.", show_default=False),
]
SetUp = Annotated[
    str | None,
    typer.Option(
        "--with",
        help="What else it does: compile, flash3, zero1, lora, vp=2, …, with commas.",
        metavar="WORDS",
        show_default=False,
    ),
]
JudgePublished = Annotated[
    bool, typer.Option("--published", help="Judge the published runs instead.")
]


def compare(  # noqa: PLR0913 (a verb's parameters are its options)
    config: ConfigFile = None,
    overrides: Overrides = None,
    tokens_per_s: MeasuredSpeed = None,
    memory: MeasuredGib = None,
    model: ModelName = None,
    cluster: Gpus = None,
    gpu_tflops: GpuTflops = None,
    gpu_gib: GpuGib = None,
    gpu_gbps: GpuGbps = None,
    seq: SeqLen = None,
    stack: StackName = _PLAIN_STACK,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks.")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="Pipeline stages.")] = 1,
    cp: Annotated[int, typer.Option(min=1, help="Context-parallel ranks.")] = 1,
    ep: Annotated[int, typer.Option(min=1, help="Expert-parallel ranks.")] = 1,
    micro_batch: MicroBatch = None,
    global_batch: GlobalBatch = None,
    precision: Precision = None,
    recompute: Recompute = None,
    network: NetworkCards = None,
    set_up: SetUp = None,
    published: JudgePublished = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Say whether a throughput is right: what is expected, the band, and the likeliest reasons.

    Expectations of other stacks are fitted to published runs: nine of ten are inside the band.

    \b
    Examples:
      shardwise compare run.yaml --tokens-per-s 10400 --memory 71
      shardwise compare --model Qwen/Qwen3-30B-A3B --cluster 16xH800 --seq 8192
        --stack megatron --tp 1 --pp 2 --ep 8 --tokens-per-s 6325
      shardwise compare --published
    Next: shardwise doctor runs/NAME
    """
    from shardwise.compare.said_words import fields_of
    from shardwise.compare.stated import StatedRun

    if published:
        _show_published(beside=config or model or tokens_per_s or memory or set_up or as_json)
        return
    measured = _given(tokens_per_s)
    config, words = split_words(config, overrides, model)
    described = changes_of_gpu(gpu_tflops, gpu_gib, gpu_gbps)
    if config is not None:
        _validate_settings_of_file(stack, (tp, pp, cp, ep), precision, recompute, network, set_up)
        batch = {"micro_batch": micro_batch, "global_batch": global_batch}
        named = changes_of(model=model, seq=seq, **batch, has_file=True)
        place = [f"cluster.name={cluster}"] if cluster else []
        given = [*named, *words, *place, *described]
        _compare_with_plan(config, given, measured, memory, as_json=as_json)
        return
    _validate_no_plan(memory, described)
    spec, gpus = _stated_model(model, words, cluster)
    stated = StatedRun(
        model=spec, cluster=gpus, tokens_per_s=measured, seq=seq, stack=stack, tensor=tp,
        pipeline=pp, context=cp, expert=ep, micro_batch=micro_batch, global_batch=global_batch,
        precision=precision, recompute=recompute, network=network, set_up=fields_of(set_up),
    )  # fmt: skip
    _compare_with_stack(stated, as_json=as_json)


def _compare_with_plan(
    config: str, words: list[str], tokens_per_s: float, memory: float | None, *, as_json: bool
) -> None:
    """A run of ours beside the plan of its file."""
    from shardwise.compare.assessment import answer_for_plan, memory_answer
    from shardwise.launch.prepare import choose_plan
    from shardwise.plan.explain import headline

    plan = choose_plan(load_config(config, words))
    held = None if memory is None else memory_answer(plan.memory, memory * GIB)
    _tell(headline(plan), answer_for_plan(plan, tokens_per_s), held, as_json=as_json)


def _compare_with_stack(stated: StatedRun, *, as_json: bool) -> None:
    """A run that options state beside the published runs of its stack."""
    from shardwise.compare.assessment import answer_for_stack

    _tell(_title_of(stated), answer_for_stack(stated), as_json=as_json)


def _given(tokens_per_s: float | None) -> float:
    if tokens_per_s is None:
        fix = "write --tokens-per-s NUMBER, the measured tokens/s of one GPU"
        raise UserError("--tokens-per-s is missing", fix=fix)
    return tokens_per_s


def _validate_alone(others: object) -> None:
    """Raise where `--published` is given with an option that it would ignore."""
    if others:
        raise UserError(
            "--published judges the table of published runs, and nothing else",
            fix="write shardwise compare --published, or leave --published out",
        )


def _validate_settings_of_file(stack: str, axes: tuple[int, ...], *others: str | None) -> None:
    """Raise for options about other stacks beside a file, which is a run of ours."""
    given = {
        "--stack": stack != _PLAIN_STACK,
        **{name: size > 1 for name, size in zip(_AXES, axes, strict=True)},
        **{name: value is not None for name, value in zip(_OTHERS, others, strict=True)},
    }
    if said := " and ".join(name for name, is_given in given.items() if is_given):
        raise UserError(
            f"{said} would be ignored: the file is a run of shardwise",
            why="its plan says how it is laid out",
            fix=f"leave {said} out and change settings, such as mesh.tensor=2 or "
            "precision.param=bf16; or name no file, but --model and --cluster",
        )


def _validate_no_plan(memory: float | None, described: list[str]) -> None:
    """Raise for what only a plan can be asked, where there is none."""
    if described:
        raise UserError(
            "there is no file, and a GPU that is not in the catalogue",
            why="expectations of other stacks are fitted to published runs, and none had it",
            fix="leave --gpu-tflops, --gpu-gib and --gpu-gbps out, or name a file: "
            "shardwise compare run.yaml",
        )
    if memory is not None:
        raise UserError(
            "--memory is compared with a plan, and there is no file",
            why="what other stacks hold is not known here",
            fix="leave --memory out, or name a file: shardwise compare run.yaml",
        )


def _title_of(stated: StatedRun) -> str:
    model = stated.model
    return (
        f"{model.name} ({format_count(model.total_params)} parameters) on {stated.cluster.name} "
        f"with {stated.stack}: tp {stated.tensor}, pp {stated.pipeline}, cp {stated.context}, "
        f"ep {stated.expert}, sequences of {stated.seq_len}"
    )


def _stated_model(
    name: str | None, words: list[str], cluster: str | None
) -> tuple[ModelSpec, ClusterSpec]:
    """The model and the GPUs that the options name."""
    from shardwise.facts.config_source import preset_named, read_model_config
    from shardwise.launch.prepare import measure_model

    if name is None or cluster is None:
        raise UserError(
            "neither a file nor a model and a cluster are named",
            fix="write shardwise compare FILE --tokens-per-s N, or --model NAME --cluster 2x8xH100",
        )
    config = load_config(None, [f"model.name={preset_named(name) or name}", *words])
    spec = measure_model(config, read_model_config(config.model))
    place = parse_cluster(cluster)
    if place.gpu is not None and place.devices_per_node > place.gpu.most_in_a_node:
        place = parse_cluster(in_usual_nodes(place, place.gpu))
    return spec, place


# ---- text ------------------------------------------------------------------------------------


def _tell(
    title: str, answer: SpeedAnswer, held: MemoryAnswer | None = None, *, as_json: bool
) -> None:
    if as_json:
        more = {} if held is None else {"memory": asdict(held)}
        typer.echo(json.dumps({**answer.to_dict(), **more}, indent=2))
        return
    for line in wrap(title, _WIDTH, subsequent_indent="  "):
        typer.echo(line)
    for line in _lines(answer, held):
        typer.echo(line)


def _lines(answer: SpeedAnswer, held: MemoryAnswer | None) -> Iterator[str]:
    low, high = answer.band.around(answer.expected)
    runs = f" ({answer.band.runs} runs)" if answer.band.runs else ""
    within = "nine of ten of " if answer.band.runs else ""
    yield from _field("measured", f"{answer.measured:,.0f} tok/s/gpu, mfu {answer.mfu:.1%}")
    yield from _field(
        "expected",
        f"{answer.expected:,.0f} tok/s/gpu; {low:,.0f} to {high:,.0f} is the band of "
        f"{within}{answer.band.words}{runs}",
    )
    yield from _field("verdict", f"{answer.verdict}: {answer.ratio:.0%} of what is expected")
    if held is not None:
        seen, least, most = map(format_bytes, (held.measured, held.low, held.high))
        said = f"{held.verdict}: {seen}, where {least} to {most} is likely"
        yield from _field("memory", said)
    yield from _field(
        "standing",
        f"a higher mfu than {answer.slower_ones} of {len(answer.alike)} published runs of "
        f"{answer.kind} ({min(answer.alike):.1%} to {max(answer.alike):.1%})",
    )
    for assumption in answer.assumed:
        yield from _field("assumed", assumption)
    yield "the published runs that are most like it"
    yield from _peer_lines(answer.nearest)
    if answer.reasons:
        yield "the likeliest reasons for the difference"
    for number, reason in enumerate(answer.reasons, start=1):
        then = "" if reason.tokens_per_s is None else (
            f" Expected then: {reason.tokens_per_s:,.0f} tok/s/gpu.")  # fmt: skip
        yield from wrap(f"{number}. {reason.title}. {reason.why}{then}", _WIDTH,
                        initial_indent="  ", subsequent_indent="     ")  # fmt: skip
        yield from wrap(f"check: {reason.check}", _WIDTH,
                        initial_indent="     ", subsequent_indent="            ")  # fmt: skip


def _field(name: str, text: str) -> list[str]:
    return wrap(
        f"{name:<8}  {text}", _WIDTH, initial_indent="  ", subsequent_indent=" " * 12,
        break_on_hyphens=False,
    )  # fmt: skip


def _peer_lines(peers: tuple[Peer, ...]) -> Iterator[str]:
    for peer in peers:
        doubted = ", which the table doubts" if peer.run.doubted else ""
        yield from wrap(
            f"{peer.run.source.split()[0]} {peer.run.label}: {peer.run.published:,.0f} tok/s/gpu, "
            f"{peer.ratio:.0%} of what is expected{doubted}",
            _WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False,
        )  # fmt: skip


def _show_published(beside: object) -> None:
    """Every stack's rows by verdict, and the rows that are not as expected."""
    from shardwise.compare.standing import read_published

    _validate_alone(beside)
    published = read_published()
    judged = [(peer, published.verdict_of(peer)) for peer in published.peers]
    words = ("as expected", "slower than expected", "faster than expected", "doubtful")
    stacks = list(dict.fromkeys(peer.stack for peer in published.peers))
    header = ("stack", "runs", "expected", "slower", "faster", "doubtful")
    rows = []
    for stack in [*stacks, "all"]:
        own = [said for peer, said in judged if stack in (peer.stack, "all")]
        rows.append((stack, str(len(own)), *(str(own.count(word)) for word in words)))
    show_table([header, *rows])
    for peer, said in judged:
        if said != "as expected":
            ratio = f"{peer.ratio:.0%}"
            text = f"line {peer.run.line}: {said} ({ratio}): {peer.stack}: {peer.run.label}"
            for line in wrap(text, _WIDTH, subsequent_indent="  ", break_on_hyphens=False):
                typer.echo(line)
    for row in published.skipped:
        doubted = "doubtful, " if row.doubted else ""
        text = f"line {row.line}: {doubted}left out: {row.why}"
        for line in wrap(text, _WIDTH, subsequent_indent="  "):
            typer.echo(line)
