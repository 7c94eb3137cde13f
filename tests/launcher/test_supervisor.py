"""Children are watched, not what they started; and nothing of them stays behind."""

import asyncio

import psutil
import pytest

from services.common.errors import Unavailable
from services.launcher.deployment import ChildSpec
from services.launcher.supervisor import Child
from tests.gateway.deployment import eventually_async


class ForkingSpec(ChildSpec):
    """Its process starts another one, which inherits its stderr."""

    module = "tests.launcher.forking"


@pytest.fixture
async def child(tmp_path):
    child = Child(ForkingSpec("forking", "worker", f"unix:{tmp_path}/nobody.sock", ()))
    yield child
    await child.stop()


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


async def started(child: Child) -> psutil.Process:
    """The process that the child has started."""
    await eventually_async(lambda: child._last_lines)
    return psutil.Process(int(child._last_lines[0]))


async def test_a_dead_child_is_noticed_though_what_it_started_lives(child):
    run = asyncio.create_task(child.run())
    inner = await started(child)
    child.process.kill()
    with pytest.raises(Unavailable, match="was ended by SIGKILL before it was ready"):
        await asyncio.wait_for(run, 30)
    await eventually_async(lambda: is_gone(inner))


async def test_stopping_a_child_ends_what_it_started(child):
    run = asyncio.create_task(child.run())
    inner = await started(child)
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)
    await child.stop()
    assert child.process.returncode is not None
    await eventually_async(lambda: is_gone(inner))
