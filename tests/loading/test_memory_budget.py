"""Sizes that are planned when a model is loaded onto a CPU."""

from pathlib import Path
from tempfile import mkdtemp

import pytest

import auraflux
from tests.models.oracles import save
from tests.models.test_qwen3_moe import qwen3_moe
from tests.tokenizer.toy_tokenizers import byte_level, folder
from tests.weights.experts.packed_folders import converted, experts_of, packed

PROMPT = list(range(200)) * 4  # longer than the usual prefill chunk


@pytest.fixture(scope="module")
def model_folder() -> Path:
    path = Path(mkdtemp(prefix="auraflux-chunks-"))
    save(qwen3_moe(vocab_size=byte_level().get_vocab_size(), max_position_embeddings=1024), path / "source")
    folder(path / "source", byte_level())
    return packed(converted(path / "source", path / "mlx", bits=4, group=32), path / "packed")


def test_prefill_reads_each_expert_from_disk_once(model_folder: Path):
    """Prefill chunks are long enough for the prompt, and do not change its logits."""
    settings = {"device": "cpu", "expert_memory": auraflux.ExpertSettings("200kB", io="direct"), "calibrate": "off"}
    usual, long = (auraflux.load(model_folder, chunk=chunk, **settings) for chunk in (512, None))
    expected, files = usual.logits(PROMPT), experts_of(model_folder)
    assert long.logits(PROMPT).equal(expected)
    assert usual.experts.cache_stats().total.nbytes > long.experts.cache_stats().total.nbytes
    assert long.experts.cache_stats().total.nbytes <= sum(file.count * file.stride for file in files.files)


def test_prefill_chunks_are_short_where_experts_stay_in_memory(model_folder: Path):
    assert auraflux.load(model_folder, device="cpu", calibrate="off").engine.chunk == 512
