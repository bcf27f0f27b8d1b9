"""Each rule about jobs on Kubernetes that somebody learnt from a lost run."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from kube_jobs import (
    CPUS,
    GPUS,
    LAUNCHERS,
    batch_job_of,
    command_of,
    job_manifest,
    jobset_spec_of,
    make_job,
    manifests_of,
    options_of,
    pod_of,
)

from shardwise.errors import ExitCode, UserError
from shardwise.launch.torchrun_agent import parse_agent
from shardwise.platforms.job import Job

ALL = tuple(LAUNCHERS)
OF_JOBSET = ("trainjob", "jobset")
NODES, RANKS = 4, 8


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return make_job(tmp_path_factory.mktemp("job"))


@pytest.mark.parametrize("on", ALL)
def test_sigterm_reaches_the_agent(on: str, job: Job) -> None:
    """A shell that stays between would get the signal, and not pass it on."""
    assert command_of(on, job)[:2] == ["shardwise", "torchrun"]
    setup = replace(job.config, launch=replace(job.launch, setup=["module load cuda"]))
    shell = command_of(on, replace(job, config=setup))
    assert shell[:2] == ["/bin/sh", "-c"]
    assert shell[2].splitlines() == ["set -e", "module load cuda", 'exec "$@"']
    assert shell[4:] == command_of(on, job)
    other = replace(job.config, launch=replace(job.launch, command="/opt/env/bin/shardwise"))
    assert command_of(on, replace(job, config=other))[:2] == ["/opt/env/bin/shardwise", "torchrun"]
    # As the first process of a container the agent would not die of it before it has ranks.
    assert pod_of(on, job)["shareProcessNamespace"] is True


@pytest.mark.parametrize("on", ALL)
def test_the_agent_understands_its_command(
    on: str, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun's own parser takes it, with what Trainer puts into the environment."""
    if on == "trainjob":
        monkeypatch.setenv("PET_NNODES", str(NODES))
        monkeypatch.setenv("PET_NPROC_PER_NODE", str(RANKS))
    monkeypatch.setenv("PET_NODE_RANK", "0")
    parsed = parse_agent(command_of(on, job)[2:])
    assert (parsed.nnodes, parsed.nproc_per_node) == (str(NODES), str(RANKS))
    assert parsed.rdzv_backend == "c10d" and "is_host=true" in parsed.rdzv_conf
    assert parsed.max_restarts == 0
    assert parsed.training_script_args == ["train", "/etc/shardwise/run.yaml"]


@pytest.mark.parametrize("on", ALL)
def test_no_signal_kills_before_the_save_is_done(on: str, job: Job) -> None:
    pod = pod_of(on, job)
    shutdown = int(options_of(on, job)["shutdown-timeout"])
    assert shutdown >= job.grace_s.value == 240
    assert pod["terminationGracePeriodSeconds"] > shutdown
    # A preStop hook would take of that time.
    assert "lifecycle" not in pod["containers"][0]


@pytest.mark.parametrize("on", ALL)
def test_a_rendezvous_has_an_id_of_its_start(on: str, job: Job) -> None:
    """The id must differ between starts of one job: from a field that its controller changes."""
    assert options_of(on, job)["rdzv-id"] == "$(SHARDWISE_ATTEMPT)"
    container = pod_of(on, job)["containers"][0]
    fields = {
        one["name"]: one["valueFrom"]["fieldRef"]["fieldPath"]
        for one in container["env"]
        if "valueFrom" in one
    }
    values = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    if on == "volcano":
        assert values["SHARDWISE_ATTEMPT"] == "$(SHARDWISE_GROUP)-$(SHARDWISE_VERSION)"
        assert fields["SHARDWISE_VERSION"] == "metadata.annotations['volcano.sh/job-version']"
    else:
        wanted = "metadata.labels['batch.kubernetes.io/controller-uid']"
        assert fields["SHARDWISE_ATTEMPT"] == wanted


@pytest.mark.parametrize("on", ALL)
def test_agents_of_late_pods_are_waited_for(on: str, job: Job) -> None:
    conf = dict(one.split("=") for one in options_of(on, job)["rdzv-conf"].split(","))
    assert int(conf["join_timeout"]) >= 1800 and int(conf["read_timeout"]) >= 1800


def test_agents_meet_at_the_first_pod(job: Job) -> None:
    """The names that JobSet and Volcano give to a pod and to their headless service."""
    assert options_of("jobset", job)["rdzv-endpoint"] == "first-node-0-0.first:29500"
    assert options_of("volcano", job)["rdzv-endpoint"] == "first-node-0.first:29500"
    # Trainer injects these, and refuses a TrainJob that sets them itself.
    assert options_of("trainjob", job)["rdzv-endpoint"] == "$(PET_MASTER_ADDR):$(PET_MASTER_PORT)"
    assert jobset_spec_of("jobset", job)["network"]["publishNotReadyAddresses"] is True


@pytest.mark.parametrize("on", ALL)
def test_shared_memory_is_large_enough_for_nccl(on: str, job: Job) -> None:
    pod = pod_of(on, job)
    mounts = {one["mountPath"]: one["name"] for one in pod["containers"][0]["volumeMounts"]}
    volume = next(one for one in pod["volumes"] if one["name"] == mounts["/dev/shm"])
    assert volume["emptyDir"]["medium"] == "Memory"
    size = int(volume["emptyDir"]["sizeLimit"].removesuffix("Mi"))
    assert size * 2**20 >= job.shm_bytes.value >= RANKS * 2**30


@pytest.mark.parametrize("on", ALL)
def test_all_pods_have_one_run_directory(on: str, job: Job) -> None:
    pod = pod_of(on, job)
    container = pod["containers"][0]
    mounts = {one["mountPath"]: one["name"] for one in container["volumeMounts"]}
    volume = next(one for one in pod["volumes"] if one["name"] == mounts["/shared"])
    assert volume["persistentVolumeClaim"]["claimName"] == "training"
    assert container["workingDir"] == "/shared"


@pytest.mark.parametrize("on", ALL)
def test_a_pod_gets_the_devices_of_the_plan(on: str, job: Job, tmp_path: Path) -> None:
    more = make_job(tmp_path, GPUS, "kubernetes.resources={rdma/hca: 8, memory: 900Gi}")
    container = pod_of(on, more)["containers"][0]
    wanted = {"nvidia.com/gpu": "8", "rdma/hca": "8", "memory": "900Gi"}
    assert container["resources"] == {"requests": wanted, "limits": wanted}
    # RDMA pins memory.
    assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    assert "securityContext" not in pod_of(on, job)["containers"][0]
    cpus = make_job(tmp_path, CPUS, name="cpus")
    assert pod_of(on, cpus)["containers"][0]["resources"]["requests"] == {"cpu": "2"}


@pytest.mark.parametrize("on", ALL)
def test_no_pod_is_started_again_alone(on: str, job: Job) -> None:
    assert pod_of(on, job)["restartPolicy"] == "Never"
    if on in OF_JOBSET:
        assert batch_job_of(on, job)["backoffLimit"] == 0


@pytest.mark.parametrize("on", OF_JOBSET)
def test_one_job_has_one_pod_for_each_node(on: str, job: Job) -> None:
    (replicated,) = jobset_spec_of(on, job)["replicatedJobs"]
    spec = replicated["template"]["spec"]
    assert replicated["replicas"] == 1 and spec["completionMode"] == "Indexed"
    assert spec["parallelism"] == spec["completions"] == NODES


def _action(on: str, job: Job, reason: str, message: str) -> str:
    """What JobSet does: the first rule whose reasons and patterns match, else a counted restart."""
    for rule in jobset_spec_of(on, job)["failurePolicy"]["rules"]:
        patterns = rule.get("onJobFailureMessagePatterns", [""])
        if reason in rule["onJobFailureReasons"] and any(
            re.search(pattern, message) for pattern in patterns
        ):
            return str(rule["action"])
    return "RestartJobSet"


def _exit_message(code: int) -> str:
    return (
        f"Container node for pod default/first-node-0-1-abcde failed with exit code {code} "
        "matching FailJob rule at index 0"
    )


@pytest.mark.parametrize("on", OF_JOBSET)
def test_preemptions_are_not_counted_and_final_errors_are_final(on: str, job: Job) -> None:
    policy = batch_job_of(on, job)["podFailurePolicy"]["rules"]
    fails = [code for rule in policy for code in rule.get("onExitCodes", {}).get("values", [])]
    assert {"type": "DisruptionTarget", "status": "True"} in policy[-1]["onPodConditions"]
    again = "RestartJobSetAndIgnoreMaxRestarts"
    disrupted = (
        "Pod default/first-node-0-1-abcde has condition DisruptionTarget matching FailJob rule at "
        "index 2"
    )
    assert _action(on, job, "PodFailurePolicy", disrupted) == again
    for code in ExitCode:
        if code == ExitCode.PREEMPTED:
            wanted = again
        elif code in (ExitCode.ENVIRONMENT, ExitCode.WORKER_DIED):
            wanted = "RestartJobSet"
        else:
            wanted = "FailJobSet"
        if code != ExitCode.OK:
            reason = "PodFailurePolicy" if code in fails else "BackoffLimitExceeded"
            message = _exit_message(code) if code in fails else "Job has reached the limit"
            assert _action(on, job, reason, message) == wanted, code
    assert _action(on, job, "DeadlineExceeded", "Job was active longer") == again
    assert jobset_spec_of(on, job)["failurePolicy"]["maxRestarts"] == job.launch.max_requeues


@pytest.mark.parametrize("on", OF_JOBSET)
def test_two_starts_never_write_at_once(on: str, job: Job) -> None:
    assert jobset_spec_of(on, job)["failurePolicy"]["restartStrategy"] == "BlockingRecreate"


@pytest.mark.parametrize("on", OF_JOBSET)
def test_kueue_admits_all_pods_or_none(on: str, job: Job, tmp_path: Path) -> None:
    assert job_manifest(on, job)["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
    for required, kind in (("true", "required"), ("false", "preferred")):
        near = make_job(
            tmp_path, GPUS, "kubernetes.topology=rack", f"kubernetes.topology_required={required}"
        )
        annotations = batch_job_of(on, near)["template"]["metadata"]["annotations"]
        assert annotations == {f"kueue.x-k8s.io/podset-{kind}-topology": "rack"}


def test_a_jobset_without_a_queue_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a JobSet needs kubernetes\.queue") as refused:
        job_manifest("jobset", make_job(tmp_path, GPUS, "kubernetes.queue=null"))
    assert "--on volcano" in refused.value.fix


def test_a_trainjob_without_a_queue_gets_a_pod_group(tmp_path: Path) -> None:
    """Trainer sets its minMember to the number of nodes."""
    job = make_job(tmp_path, GPUS, "kubernetes.queue=null")
    runtime, made = manifests_of(LAUNCHERS["trainjob"], job)[1:]
    assert "coscheduling" in runtime["spec"]["podGroupPolicy"]
    assert runtime["spec"]["mlPolicy"]["numNodes"] == NODES
    assert "kueue.x-k8s.io/queue-name" not in made["metadata"]["labels"]


def test_a_trainjob_is_written_for_trainer_2_2(job: Job) -> None:
    runtime, made = manifests_of(LAUNCHERS["trainjob"], job)[1:]
    trainer = made["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (NODES, RANKS)
    assert runtime["spec"]["mlPolicy"]["torch"] == {}
    assert "podGroupPolicy" not in runtime["spec"]
    for gone in ("podTemplateOverrides", "elasticPolicy"):
        assert gone not in made["spec"] and gone not in runtime["spec"]["mlPolicy"]
    assert not [one for one in trainer["env"] if one["name"].startswith("PET_")]
    reference = made["spec"]["runtimeRef"]
    assert (reference["kind"], reference["name"]) == ("TrainingRuntime", "first")
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    labels = replicated["template"]["metadata"]["labels"]
    assert labels["trainer.kubeflow.org/trainjob-ancestor-step"] == "trainer"
    containers = replicated["template"]["spec"]["template"]["spec"]["containers"]
    assert (replicated["name"], containers[0]["name"]) == ("node", "node")


def test_volcano_starts_all_pods_or_none(job: Job) -> None:
    spec = job_manifest("volcano", job)["spec"]
    (task,) = spec["tasks"]
    assert spec["minAvailable"] == task["minAvailable"] == task["replicas"] == NODES
    assert (spec["schedulerName"], spec["queue"]) == ("volcano", "gpus")


def test_volcanos_counts_of_pods_are_no_ranks(job: Job) -> None:
    """Its pytorch plugin would set RANK and WORLD_SIZE, by which ranks would take a pod for one."""
    assert list(job_manifest("volcano", job)["spec"]["plugins"]) == ["svc"]
    names = [one["name"] for one in pod_of("volcano", job)["containers"][0]["env"]]
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} & set(names)


def test_volcano_restarts_the_whole_job(job: Job) -> None:
    spec = job_manifest("volcano", job)["spec"]
    codes = {one["exitCode"]: one["action"] for one in spec["policies"] if "exitCode" in one}
    assert codes == {2: "TerminateJob", 3: "TerminateJob", 5: "TerminateJob", 7: "TerminateJob"} | {
        75: "RestartJob"
    }
    # The first policy that matches is taken, so the one for all failures comes last.
    assert spec["policies"][-1] == {"events": ["PodFailed", "PodEvicted"], "action": "RestartJob"}
    assert spec["maxRetry"] > job.launch.max_requeues


@pytest.mark.parametrize(
    ("tier", "wanted"),
    [
        ("2", {"mode": "soft", "highestTierAllowed": 2}),
        ("rack", {"mode": "soft", "highestTierName": "rack"}),
    ],
)
def test_volcano_knows_tiers_of_the_network(
    tier: str, wanted: dict[str, object], tmp_path: Path
) -> None:
    job = make_job(tmp_path, GPUS, f"kubernetes.topology={tier}")
    assert job_manifest("volcano", job)["spec"]["networkTopology"] == wanted


@pytest.mark.parametrize("on", ALL)
def test_the_plans_walltime_ends_a_start(on: str, job: Job) -> None:
    spec = pod_of(on, job) if on == "volcano" else batch_job_of(on, job)
    assert spec["activeDeadlineSeconds"] == 86400
    unlimited = replace(job, walltime_s=replace(job.walltime_s, value=None))
    spec = pod_of(on, unlimited) if on == "volcano" else batch_job_of(on, unlimited)
    assert "activeDeadlineSeconds" not in spec


@pytest.mark.parametrize("on", ALL)
def test_nodes_that_are_left_out_get_no_pod(on: str, job: Job, tmp_path: Path) -> None:
    assert "affinity" not in pod_of(on, job)
    without = pod_of(on, make_job(tmp_path, GPUS, "launch.exclude=[b,a]"))
    rules = without["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    (term,) = rules["nodeSelectorTerms"]
    wanted = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["a", "b"]}
    assert term["matchExpressions"] == [wanted]


@pytest.mark.parametrize("on", ALL)
def test_what_the_user_wrote_is_not_expanded(on: str, tmp_path: Path) -> None:
    """Kubernetes would replace `$(NAME)` in commands and in values of variables."""
    job = make_job(
        tmp_path, GPUS, "launch.environment={A: $(HOME) $x}", "launch.setup=[echo $(date)]"
    )
    container = pod_of(on, job)["containers"][0]
    values = {one["name"]: one.get("value") for one in container["env"]}
    assert values["A"] == "$$(HOME) $$x"
    assert container["command"][2].splitlines()[1] == "echo $$(date)"


@pytest.mark.parametrize("on", ALL)
def test_every_setting_that_a_scheduler_acts_on_has_a_reason(on: str, job: Job) -> None:
    settings = LAUNCHERS[on].render(job).main.settings
    wanted = ["restartPolicy", "terminationGracePeriodSeconds", "medium", "claimName"]
    wanted += ["nvidia.com/gpu", "workingDir", "activeDeadlineSeconds"]
    wanted += ["minAvailable"] if on == "volcano" else ["backoffLimit", "maxRestarts"]
    for name in wanted:
        assert [one.why for one in settings if one.name.endswith(f".{name}")], name


@pytest.mark.parametrize("on", ALL)
def test_an_elastic_job_goes_on_with_the_pods_that_get_a_node(
    on: str, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun takes a range, and a pod that never gets a node does not keep the job open."""
    elastic = make_job(tmp_path, GPUS, "launch.elastic=true")
    monkeypatch.setenv("PET_NNODES", str(NODES))
    monkeypatch.setenv("PET_NPROC_PER_NODE", str(RANKS))
    monkeypatch.setenv("PET_NODE_RANK", "0")
    parsed = parse_agent(command_of(on, elastic)[2:])
    assert parsed.nnodes == "2:4" and "last_call_timeout=120" in parsed.rdzv_conf
    # The batch stays as it was planned, whatever the number of pods.
    data = manifests_of(LAUNCHERS[on], elastic)[0]["data"]["run.yaml"]
    batch = yaml.safe_load(data)["train"]["global_batch"]
    assert batch == elastic.config.train.global_batch != "auto"
    if on == "volcano":
        spec = job_manifest(on, elastic)["spec"]
        assert (spec["minAvailable"], spec["minSuccess"], spec["tasks"][0]["replicas"]) == (2, 2, 4)
        assert spec["tasks"][0]["minAvailable"] == 2
    else:
        spec = batch_job_of(on, elastic)
        assert spec["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}
        assert spec["parallelism"] == spec["completions"] == NODES
        assert "successPolicy" not in batch_job_of(on, job)
    assert parse_agent(command_of(on, job)[2:]).nnodes == str(NODES)


@pytest.mark.parametrize(
    ("on", "override", "said"),
    [
        ("trainjob", "kubernetes.queue=null", r"launch\.elastic needs kubernetes\.queue"),
        ("jobset", "kubernetes.topology=rack", "do not go together with Kueue"),
    ],
)
def test_an_elastic_job_that_would_get_all_pods_or_none_is_refused(
    on: str, override: str, said: str, tmp_path: Path
) -> None:
    job = make_job(tmp_path, GPUS, "launch.elastic=true", override)
    with pytest.raises(UserError, match=said):
        job_manifest(on, job)
    assert job_manifest("volcano", job)["spec"]["minAvailable"] == 2
