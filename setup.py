"""Generates the stubs, then builds either everything or the wheel of one service.

``TOKA_SERVICE=gateway|scheduler|worker pip wheel .`` packs that service, ``services.common`` and the contracts only.
"""

import os
import runpy
from pathlib import Path

from setuptools import find_namespace_packages, setup

ROOT = Path(__file__).parent
SERVICES = ("gateway", "scheduler", "worker")
TEXT_ONLY = ("gateway", "scheduler")  # they need the built-in models' tokenizers, not the weights
BUILTIN_MODELS = ("services.common.builtin_model", "services.common.builtin_moe_model")
COMMANDS = {
    "gateway": [
        "toka-gateway = services.gateway.__main__:main",
        "toka-key = services.gateway.http.new_key:main",
    ],
    "scheduler": [
        "toka-scheduler = services.scheduler.__main__:main",
        "toka-replay = services.scheduler.record.replay:main",
        "toka-inspect = services.scheduler.record.inspection:main",
    ],
    "worker": [
        "toka-worker = services.worker.__main__:main",
        "toka-workers = services.worker.ranks:main",
    ],
    "launcher": [
        "toka = services.launcher.__main__:main",
        "tksrs = services.launcher.__main__:main",
        "toka-compose = services.launcher.compose:main",
        "toka-ping = services.launcher.ping:main",
        "tksrs-ping = services.launcher.ping:main",
        "toka-download = services.launcher.download:main",
        "toka-run-batch = services.launcher.run_batch:main",
    ],
    "cli": [
        "toka-bench = services.cli.bench:main",
        "toka-doctor = services.cli.doctor:main",
        "toka-top = services.cli.top:main",
    ],
}

runpy.run_path(str(ROOT / "protos" / "generate.py"))["generate_stubs"]()

chosen = os.environ.get("TOKA_SERVICE")
if chosen and chosen not in SERVICES:
    raise SystemExit(f"TOKA_SERVICE={chosen!r}: expected one of {', '.join(SERVICES)}, or unset for all of them")

parts = ["common", chosen] if chosen else ["common", *COMMANDS, "client"]
packages = ["services"]
for part in parts:
    inner = find_namespace_packages(f"services/{part}")
    packages += [f"services.{part}", *(f"services.{part}.{name}" for name in inner)]
packages += ["tokasaurus", *(f"tokasaurus.{name}" for name in find_namespace_packages("protos/tokasaurus"))]

setup(
    packages=packages,
    package_dir={"services": "services", "tokasaurus": "protos/tokasaurus"},
    package_data={
        "tokasaurus": ["**/*.proto", "**/*.pyi"],
        **{package: ["*"] for package in BUILTIN_MODELS},
        "services.gateway.console": ["static/*"],
    },
    exclude_package_data={package: ["*.safetensors"] if chosen in TEXT_ONLY else [] for package in BUILTIN_MODELS},
    entry_points={"console_scripts": [command for part in parts for command in COMMANDS.get(part, [])]},
)
