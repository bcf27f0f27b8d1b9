"""All sections together: one run."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardwise.config.schema.adapter import AdapterConfig
from shardwise.config.schema.budget import MemoryConfig, PrecisionConfig
from shardwise.config.schema.diloco import DilocoConfig
from shardwise.config.schema.kubernetes import KubernetesConfig
from shardwise.config.schema.model import DataConfig, ModelConfig
from shardwise.config.schema.place import ClusterConfig, MeshConfig, ShardConfig
from shardwise.config.schema.preference import PreferenceConfig
from shardwise.config.schema.record import CheckpointConfig, GatesConfig, ObserveConfig
from shardwise.config.schema.scheduler import LaunchConfig
from shardwise.config.schema.skypilot import SkyPilotConfig
from shardwise.config.schema.training import OptimConfig, TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """One run: everything that a user said, nothing that was derived."""

    name: str = "run"
    """Name of the run directory. Unset: the file's name."""

    runs_dir: str = "runs"
    """Directory that holds the run directories."""

    model: ModelConfig = field(default_factory=ModelConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    data: DataConfig = field(default_factory=DataConfig)
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    diloco: DilocoConfig = field(default_factory=DilocoConfig)
    shard: ShardConfig = field(default_factory=ShardConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    gates: GatesConfig = field(default_factory=GatesConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    kubernetes: KubernetesConfig = field(default_factory=KubernetesConfig)
    skypilot: SkyPilotConfig = field(default_factory=SkyPilotConfig)

    @property
    def num_sites(self) -> int:
        """Groups of ranks that train apart between two outer steps."""
        return self.cluster.datacenters if self.mesh.site == "auto" else self.mesh.site

    @property
    def num_jobs(self) -> int:
        """Jobs that make up the run, each of them a site; 1 where one job has all sites."""
        return 1 if self.diloco.meet is None else self.num_sites

    @property
    def sites_here(self) -> int:
        """Sites in this job."""
        return self.num_sites // self.num_jobs
