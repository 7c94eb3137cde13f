"""Runs a scheduler: the command ``toka-scheduler``."""

from services.common.config import SchedulerConfig
from services.common.process.service import run_service, share_arena
from services.scheduler.server import serve


def main() -> None:
    share_arena()
    run_service("scheduler", SchedulerConfig, serve)


if __name__ == "__main__":
    main()
