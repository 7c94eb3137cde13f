"""The commands under "Certificates" in docs/security-setup.md make certificates that our servers and clients take."""

import asyncio
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from services.common.config import GrpcFlags
from services.common.rpc.certificates import Certificates
from services.common.rpc.channel import Dialer
from services.common.rpc.probe import probe
from services.common.rpc.server import RpcServer

ROOT = Path(__file__).parents[3]


def commands() -> str:
    page = (ROOT / "docs" / "security-setup.md").read_text()
    section = page.partition("\n## Certificates\n")[2].partition("\n## ")[0]
    [block] = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    return block


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl")
async def test_certificates_made_as_documented_are_taken(tmp_path):
    command = ["sh", "-ec", commands()]
    made = await asyncio.to_thread(subprocess.run, command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert made.returncode == 0, made.stderr
    assert made.stdout.endswith("host-a.pem: OK\nhost-b.pem: OK\n")

    def of(host: str) -> GrpcFlags:
        files = {"grpc_ca": "ca.pem", "grpc_cert": f"{host}.pem", "grpc_key": f"{host}.key"}
        return GrpcFlags(**{flag: str(tmp_path / name) for flag, name in files.items()})

    server = RpcServer("test", certificates=Certificates.of(of("host-a")))
    address = await server.start("127.0.0.1:0")
    await server.set_ready(True)
    assert await asyncio.to_thread(probe, address, Dialer.of(of("host-b"))) == "SERVING"
    assert (await asyncio.to_thread(probe, address)).startswith("UNAVAILABLE")
    await server.stop(0)
