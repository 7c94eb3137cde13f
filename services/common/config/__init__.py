"""Every flag of the services, in one place. A config is frozen and valid once made; an error names flag and fix.

``...Flags`` is a group of flags, which extends ``Config`` alone and checks what concerns itself. ``...Config`` is a
program: the groups that it is composed of, and the checks between them. A config is made once, by the main thread.
"""

from services.common.config.command_line import command_from_command_line, fail, from_command_line
from services.common.config.deployment import ChosenDeploymentConfig, DeploymentConfig
from services.common.config.gateway import GatewayConfig
from services.common.config.grpc import GrpcFlags
from services.common.config.keys import API_KEY_VARIABLES
from services.common.config.scheduler import PRIORITY_CLASSES, SchedulerConfig
from services.common.config.service import LogFormat, ServiceFlags
from services.common.config.usage import usage
from services.common.config.worker import ChosenWorkerConfig, WorkerConfig
