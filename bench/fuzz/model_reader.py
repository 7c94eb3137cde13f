"""Read models as the services do: ``python -m bench.fuzz.model_reader``.

Each line of stdin names a directory. The answer is a line of JSON: ``{"stage", "refused"}`` or ``{"stage", "raised"}``
for each stage that failed. The CPU time and the memory for a directory are bounded. Beyond them, the process is killed
or its allocations fail.
"""

import json
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from services.common.errors import InvalidRequest, TokaError
from services.common.model.files import read_card
from services.common.model.json_object import read_json
from services.common.text.grammar import Grammars
from services.common.text.thinking import ThinkingTokens
from services.common.text.tokenizer import Tokenizer
from services.worker.described.memory import FLOAT32, rotation_bytes, weight_bytes
from services.worker.described.ranks import ALONE
from services.worker.described.refusals import refuse_too_large_weights
from services.worker.described.registry import read_model_config
from services.worker.described.shares import refuse_unshareable
from services.worker.described.stages import layers_of
from services.worker.layers.factory import make_kernels
from services.worker.models import weights
from services.worker.models.decoder import DecoderModel

CPU_S = 20.0  # for one directory; a whole model takes below 1 s
MEMORY = 1 << 30  # bytes in addition to those of the libraries
_DEVICE_MEMORY = 1 << 28  # bytes of the simulated device
_TEXT = "Why is 今日 the 1st? 🙂\n"
_CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": _TEXT}]


def card(directory: str) -> None:
    """Read the files that ``toka`` and a scheduler read."""
    read_card(directory, weights=True)


def text(directory: str) -> None:
    """Read the files that a gateway, a scheduler and the compiler of grammars read."""
    tokenizer = Tokenizer.load(directory)
    ThinkingTokens.of(tokenizer)
    tokenizer.decode(tokenizer.encode(_TEXT))
    Grammars(tokenizer, (1,)).matcher('start: "a"').compute_bitmask()
    if tokenizer.has_chat_template:
        try:
            tokenizer.encode_chat(_CHAT)
        except InvalidRequest as error:
            if error.field != "messages":
                raise


def worker(directory: str) -> None:
    """Read the files that a worker on a CPU reads."""
    described = read_model_config(read_json(Path(directory) / "config.json", required=True))
    refuse_unshareable(described, 1)
    [layers] = layers_of(described, 1, ())
    weights.check(Path(directory), described)
    needed = weight_bytes(described, ALONE, layers, FLOAT32, "none") + rotation_bytes(described)
    refuse_too_large_weights(directory, needed, _DEVICE_MEMORY)
    device = torch.device("cpu")
    model = DecoderModel(described, torch.float32, device, make_kernels(device, torch.float32))
    weights.load(Path(directory), model.targets(), described)


STAGES: tuple[Callable[[str], None], ...] = (card, text, worker)


def main() -> None:
    # Load libraries before the limits apply.
    for stage in STAGES:
        stage("builtin" if stage is not worker else str(read_card("builtin").directory))
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print(flush=True)
    for line in sys.stdin:
        failed = []
        for stage in STAGES:
            signal.setitimer(signal.ITIMER_PROF, CPU_S)
            try:
                stage(line.rstrip("\n"))
            except TokaError as error:
                failed.append({"stage": stage.__name__, "refused": error.message})
            except BaseException:
                failed.append({"stage": stage.__name__, "raised": traceback.format_exc()[-4000:]})
            signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(failed), flush=True)


if __name__ == "__main__":
    main()
