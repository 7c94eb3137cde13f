"""The boot on a GPU, with runners that compute nothing."""

import weakref

import pytest
import torch

from services.worker.boot.common import RunnerParts, make_limits
from services.worker.boot.progress import BootProgress
from services.worker.described.ranks import Ranks
from services.worker.described.registry import read_model_config
from services.worker.layers.kernels import TorchKernels
from services.worker.models.decoder import DecoderModel
from services.worker.parallel.exchange import make_exchanges
from tests.worker.interpreter import needs_triton
from tests.worker.test_cuda_steps import CONFIG, FLAGS, make_model

pytestmark = [needs_triton, pytest.mark.usefixtures("triton_ready")]


def test_nothing_of_a_runner_is_left_after_a_start_that_failed(monkeypatch):
    """Whatever the reason: connections to other ranks wait for the end of graphs that use them."""
    from services.worker.boot import cuda as boot_cuda

    class Runner:
        def __init__(self) -> None:
            self.graphs = [self]  # as places do, it knows itself

    made = []

    def assemble(*_) -> Runner:
        runner = Runner()
        made.append(weakref.ref(runner))
        return runner

    def rehearse(runner, *_) -> None:
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 40, 1 << 40))
    monkeypatch.setattr(boot_cuda, "refuse_unsupported", lambda *_: None)
    monkeypatch.setattr(boot_cuda, "_measure", lambda *_: 0)
    monkeypatch.setattr(boot_cuda, "assemble", assemble)
    monkeypatch.setattr(boot_cuda, "rehearse", rehearse)
    with pytest.raises(RuntimeError, match="broken on purpose"):
        boot_cuda.make_runner(RunnerParts(FLAGS, make_model(torch.device("cpu"))))
    assert [each() for each in made] == [None]


def test_a_stage_without_experts_or_windows_pads_steps_as_the_others_do(monkeypatch):
    from services.worker.boot import cuda as boot_cuda

    captured = []

    class Runner:
        def __init__(self, model: DecoderModel) -> None:
            self.limits, self.grain = make_limits(FLAGS, model, 8), 1

        def run(self, *_) -> None:
            pass

        reset = run

        def capture(self, *_, has_experts: bool, has_windows: bool) -> None:
            captured.append((has_experts, has_windows))

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 40, 1 << 40))
    features = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [0]}
    features |= {"decoder_sparse_step": 1, "use_sliding_window": True, "sliding_window": 8}
    config = read_model_config(CONFIG | features | {"architectures": ["Qwen3MoeForCausalLM"]})
    for stage in range(2):
        ranks, layers = Ranks(pp_rank=stage, pp_size=2), range(stage, stage + 1)
        model = DecoderModel(config, torch.float32, torch.device("cpu"), TorchKernels(), ranks=ranks, layers=layers)
        parts = RunnerParts(FLAGS.model_copy(update={"use_cudagraphs": True}), model)
        boot_cuda.rehearse(Runner(model), parts, make_exchanges(Ranks(), 1), BootProgress())
    assert captured == [(True, True)] * 2
