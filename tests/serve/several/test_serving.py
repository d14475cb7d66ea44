"""`auraflux serve` with several models: their processes, memory and names."""

import random
import re
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
from click.testing import CliRunner

from auraflux.cli import main
from auraflux.cli.options.serve import parsed
from auraflux.cli.serving.several import settings_of
from auraflux.errors import SettingsError
from auraflux.serve.several.catalog import Entry
from tests.engine.tiny import tiny
from tests.serve.server import process

FILE = """
memory = "1.25GB"
[models.small]
path = "{small}"
aliases = ["gpt-4o"]
cache-memory = "20MB"
temperature = 0
max_sequences = 2
[models.mixed]
path = "{mixed}"
cache-memory = "20MB"
kv = "k8v4"
"""


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A folder with a catalog of two tiny models, and memory for one and a half."""
    (tmp_path / "models.toml").write_text(FILE.format(small=tiny(), mixed=tiny(mixture=True)))
    return tmp_path


def planned_and_used(url: str, pid: int) -> tuple[float, float]:
    """Return the memory that was planned for the loaded models, and that the model processes use."""
    text = httpx.get(f"{url}/metrics").text
    planned = sum(float(value) for value in re.findall(r"^auraflux:model_memory_bytes\{.*\} (\S+)$", text, re.M))
    used = 0
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            found = dict(re.findall(r"^(PPid|RssAnon|Name):\s+(\S+)", status.read_text(), re.M))
            command = (status.parent / "cmdline").read_text()
        except OSError:
            continue
        if found.get("PPid") == str(pid) and "spawn_main" in command:
            used += int(found["RssAnon"]) << 10
    return planned, used


def test_options_of_one_model():
    chosen = {**parsed(["--temperature", "0.5", "--kv", "k8v8"]), "models": None}
    own = settings_of(Entry("a", "a", settings={"kv": "k4v4", "max_sequences": 3, "graph": False, "exact": True}), chosen)
    assert (own["kv"], own["max_sequences"], own["graphs"], own["exact"]) == ("k4v4", 3, False, True)
    # the others are those of the command line
    assert (own["temperature"], own["name"]) == (0.5, "a")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"port": 80}, "has port, which the whole server has"),
        ({"api_key": "x"}, "has api_key"),
        ({"wings": 2}, "No such option"),
        ({"context": "long"}, "is not a valid integer"),
        ({"kv": ["k4v4"]}, "kv is"),
    ],
)
def test_invalid_options_of_a_model_are_refused(settings: dict, message: str):
    with pytest.raises(SettingsError, match=message):
        settings_of(Entry("a", "a", settings=settings), parsed([]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models-memory", "1GB"], "--models-memory is for several models"),
        (["--models", "/nowhere"], "cannot be read"),
        (["org/name", "--models", "/nowhere"], "give either the model"),
        (["--models", "FOLDER", "--name", "x"], "--name is not supported with several models"),
        (["--models", "FOLDER", "--models-memory", "much"], "--models-memory): 'much'"),
        (["--models", "FOLDER", "--keep-alive", "soon"], "keep_alive is 'soon'"),
        (["--models", "FOLDER", "--ray"], "--ray serves replicas of one model"),
    ],
)
def test_invalid_options_are_refused(models: Path, arguments: list[str], message: str):
    words = [str(models) if word == "FOLDER" else word for word in arguments]
    found = CliRunner().invoke(main, ["serve", *words, "--port", "0"])
    assert found.exit_code == 1
    assert message in found.output
    assert "Traceback" not in found.output


def test_models_of_a_folder(tmp_path: Path):
    shutil.copytree(tiny(), tmp_path / "small")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text('{"model_type": "nothing"}')
    with process("--cache-memory", "20MB", model=str(tmp_path)) as served:
        served.ready()
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            listed = {model.id: model.model_dump() for model in client.models.list()}
            assert (listed["small"]["loaded"], listed["small"]["max_model_len"]) == (False, 512)
            assert listed["broken"]["model_type"] == "unknown"
            shown = httpx.post(f"{served.url}/api/show", json={"model": "small"}).json()
            assert (shown["details"]["family"], shown["capabilities"]) == ("llama", ["completion"])
            answer = client.completions.create(model="small", prompt="hello", max_tokens=4)
            assert (answer.model, answer.usage.completion_tokens) == ("small", 4)
            with pytest.raises(openai.InternalServerError, match=r"cannot be loaded: .*'nothing'"):
                client.completions.create(model="broken", prompt="hello", max_tokens=4)
        [running] = httpx.get(f"{served.url}/api/ps").json()["models"]
        planned, used = planned_and_used(served.url, served.popen.pid)
        assert running["size"] == planned > used
        served.signal(signal.SIGTERM)
        assert served.end() == 0, served.log
        assert "Traceback" not in served.log


@pytest.mark.slow
def test_200_mixed_requests_with_memory_for_one_and_a_half(models: Path):
    rng = random.Random(0)
    with process("--load-timeout", "600", model=str(models)) as served:
        served.ready()
        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=900)

        def ask(name: str) -> tuple[str, int, float]:
            started = time.perf_counter()
            answer = client.completions.create(model=name, prompt="hello", max_tokens=8, extra_body={"ignore_eos": True})
            return answer.model, answer.usage.completion_tokens, time.perf_counter() - started

        names = [rng.choice(("small", "mixed")) for _ in range(200)]
        with client, ThreadPoolExecutor(32) as threads:
            answers = list(threads.map(ask, names))
        assert [(name, tokens) for name, tokens, _ in answers] == [(name, 8) for name in names]
        waits = sorted(seconds for _, _, seconds in answers)
        loads = served.log.count("INFO loaded ")
        print(f"200 requests, {loads} loads: p50 {waits[99]:.2f} s, p99 {waits[197]:.2f} s, longest {waits[-1]:.2f} s")
        planned, used = planned_and_used(served.url, served.popen.pid)
        assert used < planned <= 1.25 * (1 << 30)
        served.signal(signal.SIGTERM)
        assert served.end() == 0, served.log
