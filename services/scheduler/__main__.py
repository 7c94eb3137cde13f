"""``toka-scheduler``: one scheduler process."""

from services.common.config import SchedulerConfig
from services.common.process import run_service
from services.scheduler.server import serve


def main() -> None:
    run_service("scheduler", SchedulerConfig, serve)


if __name__ == "__main__":
    main()
