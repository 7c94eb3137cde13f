"""Fingerprints of different revisions of a model differ."""

import json
import shutil
from pathlib import Path

import gguf
import pytest

from services.common.errors import InvalidRequest
from services.common.model.checkpoint_files import weight_paths
from services.common.model.fingerprint import model_fingerprint
from tests.checkpoints import make_checkpoint
from tests.gguf_files import write_gguf


@pytest.fixture(scope="module")
def revisions(tmp_path_factory) -> tuple[Path, Path]:
    """Two models whose files differ only in the values of the weights."""
    folder = tmp_path_factory.mktemp("models")
    return tuple(make_checkpoint(folder / str(seed), "llama", seed=seed, sharded=True) for seed in range(2))


@pytest.fixture
def copy(revisions, tmp_path) -> Path:
    return shutil.copytree(revisions[0], tmp_path / "copy")


def test_copies_of_a_model_have_one_fingerprint(revisions, copy):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config, indent=7))
    (copy / "README.md").write_text("another one")
    for weights in (True, False):
        assert model_fingerprint(copy, weights=weights) == model_fingerprint(revisions[0], weights=weights)


def test_weights_of_equal_shapes_and_other_values_have_another_one(revisions):
    first, second = (model_fingerprint(each, weights=True) for each in revisions)
    assert first != second


def test_random_weights_need_no_files(revisions, copy):
    for path in (*copy.glob("*.safetensors"), *copy.glob("*.index.json")):
        path.unlink()
    expected = model_fingerprint(revisions[1], weights=False)
    assert model_fingerprint(copy, weights=False) == expected
    with pytest.raises(InvalidRequest, match="there are no weights"):
        model_fingerprint(copy, weights=True)


@pytest.mark.parametrize("weights", [True, False])
def test_another_config_has_another_one(weights, revisions, copy):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    assert model_fingerprint(copy, weights=weights) != model_fingerprint(revisions[0], weights=weights)


def test_the_end_of_every_file_counts(revisions, copy):
    expected, paths = model_fingerprint(revisions[0], weights=True), weight_paths(copy)
    assert len(paths) > 1
    for path in paths:
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert model_fingerprint(copy, weights=True) != expected
        path.write_bytes(content)
    assert model_fingerprint(copy, weights=True) == expected


def test_gguf_files_differ_too(revisions, tmp_path):
    kind = gguf.GGMLQuantizationType.Q8_0
    first, second = (write_gguf(tmp_path / f"{n}.gguf", each, kind=kind) for n, each in enumerate(revisions))
    again = tmp_path / "another" / first.name
    again.parent.mkdir()
    shutil.copy(first, again)
    second = second.rename(tmp_path / "another" / "second.gguf")
    for weights in (True, False):
        found = [model_fingerprint(each, weights=weights) for each in (first, again, second)]
        assert found[0] == found[1] != found[2]
