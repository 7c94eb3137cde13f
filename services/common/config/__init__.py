"""Every flag of every program, in one place. A config is frozen and valid once made; an error names flag and fix."""

from services.common.config.command_line import from_command_line
from services.common.config.deployment import ChosenDeploymentConfig, DeploymentConfig
from services.common.config.gateway import GatewayConfig
from services.common.config.grpc import GrpcConfig
from services.common.config.keys import KeysConfig
from services.common.config.metrics import MetricsConfig
from services.common.config.scheduler import PRIORITY_CLASSES, SchedulerConfig
from services.common.config.service import LogFormat, ServiceConfig
from services.common.config.usage import usage
from services.common.config.worker import ChosenWorkerConfig, WorkerConfig

__all__ = [
    "PRIORITY_CLASSES",
    "ChosenDeploymentConfig",
    "ChosenWorkerConfig",
    "DeploymentConfig",
    "GatewayConfig",
    "GrpcConfig",
    "KeysConfig",
    "LogFormat",
    "MetricsConfig",
    "SchedulerConfig",
    "ServiceConfig",
    "WorkerConfig",
    "from_command_line",
    "usage",
]
