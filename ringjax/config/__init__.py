"""Settings of a run: the typed schema, the strict YAML loader, and the rules between settings."""

from ringjax.config.check import VOCAB_MULTIPLE, Problem, check_config
from ringjax.config.describe import Setting, sections, settings
from ringjax.config.errors import ConfigError, UserError
from ringjax.config.load import dump_config, load_config
from ringjax.config.schema import (
    AttentionConfig,
    Config,
    DataConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    ProcessesConfig,
    RunConfig,
    TrainConfig,
)

__all__ = [
    "VOCAB_MULTIPLE",
    "AttentionConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "MeshConfig",
    "ModelConfig",
    "OptimConfig",
    "Problem",
    "ProcessesConfig",
    "RunConfig",
    "Setting",
    "TrainConfig",
    "UserError",
    "check_config",
    "dump_config",
    "load_config",
    "sections",
    "settings",
]
