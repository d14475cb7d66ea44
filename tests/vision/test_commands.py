"""Pictures on the command line: `generate --image`, `chat --image` and `/image` in a chat."""

from pathlib import Path
from random import Random

import pytest
from click.testing import CliRunner, Result

from auraflux.cli import main
from tests.engine.tiny import tiny
from tests.vision.qwen_models import file_of
from tests.vision.shapes.asked import MODEL
from tests.vision.shapes.data import Thing, description, picture

SHOWN = [Thing("red", "circle"), Thing("blue", "square")]
QUESTION = "What is in the picture?"
SMALL = ["--context", "512", "--device", "cpu", "--temperature", "0"]


@pytest.fixture(autouse=True)
def filled_jit_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("auraflux.ops.simd.compile.cache_folder.is_cache_empty", lambda: False)


@pytest.fixture
def shapes(tmp_path: Path) -> Path:
    (tmp_path / "shapes.png").write_bytes(file_of(picture(SHOWN, (280, 140), Random(3))[0]))
    (tmp_path / "notes.txt").write_text("no picture")
    return tmp_path


def run(*words: str | Path, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, [*map(str, words), *SMALL], input=stdin)


def test_generate_answers_about_a_picture(shapes):
    done = run("generate", MODEL, "-p", QUESTION, "--image", shapes / "shapes.png", "--max-tokens", "32")
    assert (done.exit_code, done.stdout.strip()) == (0, description(SHOWN))


def test_a_chat_takes_pictures_at_its_start_and_in_between(shapes):
    file = shapes / "shapes.png"
    lines = [QUESTION, "/reset", f"/image {file}", QUESTION, "How many shapes are there?", f"/image {shapes / 'none.png'}"]
    done = run("chat", MODEL, "--image", file, stdin="\n".join(lines))
    assert done.exit_code == 0
    assert done.stdout.splitlines() == [description(SHOWN), description(SHOWN), "two"]
    assert "there is no file" in done.stderr


@pytest.mark.parametrize(
    ("model", "name", "message"),
    [
        (MODEL, "notes.txt", "unknown format or damaged"),
        (MODEL, "none.png", "does not exist"),
        (None, "shapes.png", "takes no images: it has no vision tower"),
    ],
)
def test_pictures_that_cannot_be_used_get_one_sentence(shapes, model, name, message):
    done = run("generate", model or tiny(), "-p", QUESTION, "--image", shapes / name)
    assert done.exit_code != 0
    assert message in done.stderr
    assert "Traceback" not in done.output
