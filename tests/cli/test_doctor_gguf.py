"""toka-doctor on GGUF files: formats, bytes and fit, and what is wrong with a file."""

from services.cli.doctor.findings import Level
from tests.cli.looking import findings, only
from tests.gguf_files import model


def test_a_file_has_its_formats_and_its_size(tmp_path):
    path = model(tmp_path / "model.gguf")
    found = only("weights", path)
    assert found.level is Level.OK
    assert found.text.endswith("complete, GGUF with F32")
    assert found.facts["bytes"] == path.stat().st_size
    assert only("tokenizer", path).level is Level.OK
    [memory] = [each for each in findings("memory", path, device="cpu") if "weights_bytes" in each.facts]
    assert memory.facts["weights_bytes"] > 0


def test_a_file_that_is_cut_off_is_incomplete(tmp_path):
    path = model(tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes()[:-100])
    [found] = findings("model", path)
    assert found.level is Level.FAIL
    assert "would end at byte" in found.text


def test_an_architecture_that_is_not_supported_is_named(tmp_path):
    [found] = findings("model", model(tmp_path / "model.gguf", architecture="mamba"))
    assert found.level is Level.FAIL
    assert "general.architecture='mamba' is not supported" in found.text


def test_a_missing_file_is_not_a_hub_id(tmp_path):
    [found] = findings("model", tmp_path / "absent.gguf")
    assert found.level is Level.FAIL
