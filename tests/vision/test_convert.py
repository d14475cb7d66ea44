"""Models with towers that are converted."""

from click.testing import CliRunner

from auraflux.cli import main
from auraflux.vision.families import takes_images
from auraflux.weights.formats.checkpoint import open_checkpoint
from tests.vision.qwen_models import make


def test_a_tower_that_is_left_out_is_named(tmp_path):
    make(tmp_path / "source")
    run = CliRunner().invoke(main, ["convert", str(tmp_path / "source"), str(tmp_path / "target"), "--bits", "4"])
    assert run.exit_code == 0, run.output
    assert "note: the vision tower is left out: the model that is written takes no images." in run.output.splitlines()
    assert takes_images(open_checkpoint(tmp_path / "source"))
    assert not takes_images(open_checkpoint(tmp_path / "target"))
    # what is written has no tower to leave out
    run = CliRunner().invoke(main, ["convert", str(tmp_path / "target"), str(tmp_path / "again"), "--bits", "4"])
    assert "note:" not in run.output
