"""Two torchrun agents as two nodes that were not started alike: named on both, nothing trained."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from launched import Node, Started, run_nodes
from transformers import LlamaConfig, LlamaForCausalLM

import shardwise
from calibrations import flat_rates, make_calibration
from shardwise.config.load import load_config
from shardwise.errors import ExitCode
from shardwise.facts.cluster import resolve_cluster
from shardwise.facts.collective_cost import Link

pytestmark = [pytest.mark.dist, pytest.mark.slow]

CONFIG = """\
model: MODEL
data: {source: text, path: TEXT, seq_len: 32, tokenizer: byte}
cluster: 2x1xCPU
shard: {strategy: full_shard}
train: {steps: 2, global_batch: 4}
checkpoint: {at_end: false}
runs_dir: RUNS
"""
TEXT = "Two nodes train one model. " * 200


class Site:
    """What two nodes need: a model, a text and a configuration; each node may have copies."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = folder / "model"
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 257}
        LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(self.model)
        self.text = folder / "text.txt"
        self.text.write_text(TEXT)
        self.config = folder / "run.yaml"
        filled = CONFIG.replace("MODEL", str(self.model)).replace("TEXT", str(self.text))
        self.config.write_text(filled.replace("RUNS", str(folder / "runs")))

    def model_elsewhere(self, *, other_values: bool = False) -> str:
        copy = Path(shutil.copytree(self.model, self.folder / f"model-{other_values}"))
        if other_values:
            file = copy / "model.safetensors"
            data = bytearray(file.read_bytes())
            length = int.from_bytes(data[:8], "little")
            for entry in json.loads(data[8 : 8 + length]).values():
                begin = entry.get("data_offsets", [0])[0] + 8 + length
                data[begin] ^= 1
            file.write_bytes(data)
        return str(copy)

    def text_elsewhere(self, *, other_words: bool = False) -> str:
        copy = self.folder / f"text-{other_words}.txt"
        copy.write_text(TEXT.replace("one model", "two loves") if other_words else TEXT)
        assert copy.stat().st_size == self.text.stat().st_size
        return str(copy)

    def measured(self, name: str, flops: float) -> dict[str, str]:
        """A cache of its own that holds a calibration of this machine for two such nodes."""
        cluster = resolve_cluster(load_config(str(self.config), []).cluster, {})
        link = Link(name="measured", bytes_per_s=1e9, hop_s=1e-5)
        found = make_calibration(cluster, flat_rates(flops), inside=None, between=link)
        file = self.folder / name / "calibration" / found.path().name
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(asdict(found)))
        return {"SHARDWISE_CACHE": str(self.folder / name)}

    def other_package(self) -> dict[str, str]:
        """The metadata of another release, found before the one that is installed."""
        found = self.folder / "packages" / "datasets-9.9.9.dist-info"
        found.mkdir(parents=True)
        (found / "METADATA").write_text("Metadata-Version: 2.1\nName: datasets\nVersion: 9.9.9\n")
        return {"PYTHONPATH": with_path(found.parent)}

    def other_home(self) -> dict[str, str]:
        (self.folder / "home").mkdir()
        return {"HOME": str(self.folder / "home")}

    def run(self, second: Node, first: Node | None = None) -> list[Started]:
        """Both nodes to their end; the first is given nothing but the configuration."""
        return run_nodes(self.folder / "output", self.config, first or Node(), second)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def assert_refused(site: Site, agents: list[Started], code: ExitCode, *words: str) -> None:
    """Both nodes say it once, end with the code, and leave nothing behind."""
    for agent in agents:
        assert agent.process.returncode == code, agent.text
        assert agent.text.count("error:") == 1, agent.text
        assert ("Traceback" in agent.text) == (code == ExitCode.WORKER_DIED), agent.text
        for word in words:
            assert word in agent.text, agent.text
    assert not (site.folder / "runs").exists()
    assert not (site.folder / "elsewhere").exists()


def test_all_that_differs_is_named_on_both_nodes(site: Site) -> None:
    """Overrides, data files, weights, package versions, environment, HOME and calibration."""
    words = (
        "optim.lr=1e-4",
        f"data.path={site.text_elsewhere(other_words=True)}",
        f"model.name={site.model_elsewhere(other_values=True)}",
    )
    environ = {"NCCL_ALGO": "Ring", **site.other_home(), **site.other_package()}
    second = Node(words, environ | site.measured("slow", 1e11))
    agents = site.run(second, Node(environ=site.measured("fast", 2e11)))
    told = (
        "optim.lr is 0.0001 there, 0.0003 on",
        "samples of data.path is sha256",
        "weights is sha256",
        "datasets is 9.9.9 there",
        "NCCL_ALGO is Ring there, not set on",
        f"HOME is {site.folder / 'home'} there",
        "calibration is sha256",
        "(rank 1): ",
    )
    assert_refused(site, agents, ExitCode.CONFIG, *told)
    # Paths and sizes are no differences.
    assert "bytes of data.path" not in agents[0].text and "model.name is" not in agents[0].text


# Each rank writes down the plan that it trains with. Only the first may make one.
NOTED = """
import json, os
if "RANK" in os.environ:
    from pathlib import Path
    from shardwise.launch import prepare, worker
    from shardwise.plan import choose

    def never(*args, **settings):
        raise RuntimeError("a rank that is not the first plans")

    if os.environ["RANK"] != "0":
        prepare.rates_for = prepare.with_measured_links = never
        prepare.resolve_cluster = choose.choose_plan = never
    run = worker.run

    def noted(plan, *args, **settings):
        file = Path(os.environ["PLANS"], f"rank-{os.environ['RANK']}.json")
        file.write_text(json.dumps(plan.to_dict()))
        return run(plan, *args, **settings)

    worker.run = noted
"""


def noting(site: Site) -> dict[str, str]:
    folder = site.folder / "noted"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(NOTED)
    return {"PYTHONPATH": with_path(folder), "PLANS": str(folder)}


def plans_of(site: Site, agents: list[Started]) -> list[bytes]:
    assert [agent.process.returncode for agent in agents] == [0, 0], [a.text for a in agents]
    assert "finished 2 steps" in agents[0].text
    assert not list((site.folder / "runs").glob(".meeting-*"))
    return [(site.folder / "noted" / f"rank-{rank}.json").read_bytes() for rank in range(2)]


def test_all_ranks_hold_the_plan_of_the_first(site: Site) -> None:
    """Bit for bit, and the one that plan.json shows."""
    environ = noting(site) | site.measured("cache", 1e11)
    first, second = plans_of(site, site.run(Node(environ=environ), Node(environ=environ)))
    assert first == second
    plan = json.loads(first)
    assert plan == json.loads((site.folder / "runs" / "run" / "plan.json").read_text())
    # It was made with what the first rank's machine was measured to do.
    assert plan["forecast"]["source"] == "measured"


def test_copies_at_other_places_train(site: Site) -> None:
    """One plan, but for the places of what each node reads."""
    text, model = site.text_elsewhere(), site.model_elsewhere()
    environ = noting(site)
    words = (f"data.path={text}", f"model.name={model}")
    found = plans_of(site, site.run(Node(words, environ), Node(environ=environ)))
    first, second = map(json.loads, found)
    assert second["config"]["data"]["path"] == text and second["weights_dir"] == model
    for old, new in ((model, str(site.model)), (text, str(site.text))):
        found[1] = found[1].replace(old.encode(), new.encode())
    assert found[0] == found[1] and first != second


def test_an_error_of_one_node_is_the_error_of_both(site: Site) -> None:
    """It comes before that node could join the other, which must not wait for it."""
    agents = site.run(Node(("train.global_batch=some",)))
    assert_refused(site, agents, ExitCode.CONFIG, "(rank 1): ", "train.global_batch")


def test_an_error_of_the_first_rank_that_plans_is_the_error_of_both(site: Site) -> None:
    """The other waits for its plan."""
    words = ("train.global_batch=5",)
    agents = site.run(Node(words), Node(words))
    assert_refused(site, agents, ExitCode.CONFIG, "train.global_batch=5 does not divide")


SETTINGS = {
    "optim.lr=1e-4": "optim.lr",
    "train.seed=1": "train.seed",
    "data.seq_len=16": "data.seq_len",
    "train.micro_batch=1": "train.micro_batch",
    "train.global_batch=8": "train.global_batch",
    "shard.strategy=no_shard": "shard.strategy",
    "train.steps=3": "train.steps",
    "checkpoint.every=1": "checkpoint.every",
    "model.overrides.rms_norm_eps=0.1": "model.overrides.rms_norm_eps",
    "observe.log_every=1": "observe.log_every",
    "name=other": "name",
}


@pytest.mark.long
@pytest.mark.parametrize("word", SETTINGS)
def test_every_setting_is_named(word: str, site: Site) -> None:
    agents = site.run(Node((word,)))
    assert_refused(site, agents, ExitCode.CONFIG, f"(rank 1): {SETTINGS[word]} is ")


def more_text(site: Site) -> Node:
    (site.folder / "more.txt").write_text(TEXT + "And more.")
    return Node((f"data.path={site.folder / 'more.txt'}",))


def second_file(site: Site) -> Node:
    (site.folder / "texts").mkdir()
    for part, name in ((TEXT[:100], "a.txt"), (TEXT[100:], "b.txt")):
        (site.folder / "texts" / name).write_text(part)
    return Node((f"data.path={site.folder / 'texts'}",))


def broken_package(site: Site) -> Node:
    """A package that cannot be imported: an error that nobody wrote a sentence for."""
    (site.folder / "packages").mkdir()
    (site.folder / "packages" / "transformers.py").write_text("raise RuntimeError('torn apart')\n")
    return Node(environ={"PYTHONPATH": with_path(site.folder / "packages")})


def other_source(site: Site) -> Node:
    package = Path(shardwise.__file__).parent
    copy = Path(shutil.copytree(package, site.folder / "source" / package.name))
    with (copy / "units.py").open("a") as stream:
        stream.write("# one line more\n")
    return Node(environ={"PYTHONPATH": with_path(copy.parent)})


def with_path(folder: Path) -> str:
    return os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])


CASES: dict[str, tuple[Callable[[Site], Node], ExitCode, str]] = {
    "words": (
        lambda site: Node((f"data.path={site.text_elsewhere(other_words=True)}",)),
        ExitCode.CONFIG,
        "samples of data.path is",
    ),
    "bytes": (more_text, ExitCode.CONFIG, "bytes of data.path is"),
    "files": (second_file, ExitCode.CONFIG, "files of data.path is 2 there, 1 on"),
    "weights": (
        lambda site: Node((f"model.name={site.model_elsewhere(other_values=True)}",)),
        ExitCode.CONFIG,
        "weights is sha256",
    ),
    "preset": (lambda site: Node(("model.name=tiny-llama",)), ExitCode.CONFIG, "model.name is"),
    "package": (
        lambda site: Node(environ=site.other_package()),
        ExitCode.ENVIRONMENT,
        "datasets is 9.9.9 there",
    ),
    "broken": (broken_package, ExitCode.WORKER_DIED, "(rank 1): RuntimeError: torn apart"),
    "source": (other_source, ExitCode.ENVIRONMENT, "shardwise is "),
    "variable": (
        lambda site: Node(environ={"NCCL_ALGO": "Ring"}),
        ExitCode.ENVIRONMENT,
        "NCCL_ALGO is Ring there, not set on",
    ),
    "home": (lambda site: Node(environ=site.other_home()), ExitCode.ENVIRONMENT, "HOME is "),
    "calibration": (
        lambda site: Node(environ=site.measured("cache", 1e11)),
        ExitCode.ENVIRONMENT,
        "calibration is sha256",
    ),
    "runs": (
        lambda site: Node((f"runs_dir={site.folder / 'elsewhere'}",)),
        ExitCode.ENVIRONMENT,
        "does not see the runs directory",
    ),
    "ranks": (
        lambda site: Node(("cluster.name=4x1xCPU",)),
        ExitCode.CONFIG,
        "cluster.name is 4x1xCPU there, 2x1xCPU on",
    ),
    "missing": (
        lambda site: Node(("data.path=/nowhere.txt",)),
        ExitCode.CONFIG,
        "(rank 1): data.path '/nowhere.txt' matches no file",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_every_difference_of_files_and_software_is_named(case: str, site: Site) -> None:
    make, code, words = CASES[case]
    assert_refused(site, site.run(make(site)), code, words)
