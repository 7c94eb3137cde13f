"""lm-evaluation-harness on our server and on transformers. Needs ``pip install 'lm_eval[api,hf]'``."""

import importlib.util
import json

import pytest

from tests.e2e.test_bench import run
from tests.real_model import needs_real_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm_eval[api,hf] is not installed"),
]


@pytest.mark.parametrize("model", ["builtin", pytest.param("smollm2", marks=needs_real_model)])
def test_scores_texts_and_log_likelihoods_are_those_of_transformers(model):
    done = run("lm_eval_agreement", f"model={model}", "limit=2")
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert (figures["loglikelihoods"], figures["texts"], figures["different_texts"]) == (8, 2, 0)
