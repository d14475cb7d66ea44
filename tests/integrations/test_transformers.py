"""`QuantizedCache` in models of transformers: their own cache is the oracle."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

from auraflux.errors import AurafluxError, InputError, SettingsError
from auraflux.integrations.transformers import PAGE, QuantizedCache, QuantizedLayer
from auraflux.weights.download.pull import locate

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "eos_token_id": None,
    "bos_token_id": None,
}
STEPS = 8
GREEDY: dict[str, Any] = {"max_new_tokens": STEPS, "do_sample": False}


def model(attention: str = "sdpa", **more: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    made = LlamaForCausalLM(LlamaConfig(**SIZES, initializer_range=0.2, **more)).eval()
    made.set_attn_implementation(attention)
    return made


def sliding_model() -> PreTrainedModel:
    torch.manual_seed(0)
    kinds = ["sliding_attention", "full_attention"]
    return Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, initializer_range=0.2, layer_types=kinds, sliding_window=32)).eval()


def tokens(*shape: int) -> Tensor:
    return torch.randint(1, 300, shape, generator=torch.Generator().manual_seed(1))


@torch.inference_mode()
def logits(of: PreTrainedModel, ids: Tensor, cache: Any, prompt: int, mask: Tensor | None = None) -> Tensor:
    """Return the logits after a prompt and after each further token, which are decoded one at a time: [B, T, V]."""
    found = []
    for start, end in [(0, prompt), *((at, at + 1) for at in range(prompt, ids.shape[1]))]:
        given = None if mask is None else mask[:, :end]
        found.append(of(ids[:, start:end], attention_mask=given, past_key_values=cache).logits[:, -1])
    return torch.stack(found, dim=1).float()


def divergence(found: Tensor, expected: Tensor) -> float:
    """Return the mean KL divergence of next-token distributions, in nats."""
    p, q = expected.log_softmax(-1), found.log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.parametrize("attention", ["eager", "auraflux"])
def test_distributions_are_those_of_the_uncompressed_cache(attention: str):
    of, ids = model(attention), tokens(2, 300 + STEPS)
    expected = logits(model(), ids, DynamicCache(), 300)
    found = {
        kv: divergence(logits(of, ids, QuantizedCache(of.config, kv, recent_window=32), 300), expected)
        for kv in ("k8v8", "k4v4", "k2v2")
    }
    assert 0 < found["k8v8"] < 1e-3 < found["k4v4"] < found["k2v2"], found
    assert found["k4v4"] < 0.1, found
    # nothing is quantized while everything is recent
    short = divergence(logits(of, ids, QuantizedCache(of.config, "k2v2", recent_window=400), 300), expected)
    assert abs(short) < 1e-5


def test_codes_and_dequantized_keys_give_the_same():
    ids = tokens(3, 400)
    for kv in ("k4v4", "k3v2"):
        found = [logits(of, ids, QuantizedCache(of.config, kv, sink_tokens=5), 390) for of in (model(), model("auraflux"))]
        torch.testing.assert_close(found[1], found[0], rtol=2e-3, atol=2e-3)


def test_memory():
    of = model()
    cache = QuantizedCache(of.config, "k4v4", sink_tokens=4, recent_window=128)
    dense = DynamicCache()
    ids = tokens(2, 1000)
    with torch.inference_mode():
        of(ids, past_key_values=cache)
        of(ids, past_key_values=dense)
    whole = (1000 - 4 - 128) // PAGE * PAGE
    # two rows of 16 channels with 4 bits and a norm, in 2 heads of 2 layers for 2 sequences
    codes = whole * 2 * (16 * 4 // 8 + 4) * 2 * 2 * 2
    full = (1000 - whole) * 2 * 16 * 4 * 2 * 2 * 2
    assert cache.nbytes == codes + full
    assert cache.nbytes < sum(layer.keys.nbytes + layer.values.nbytes for layer in dense.layers) / 2.5
    assert cache.get_seq_length() == 1000


@pytest.mark.parametrize("attention", ["sdpa", "auraflux"])
def test_generate(attention: str):
    of, ids = model(attention), tokens(2, 200)
    cache = QuantizedCache(of.config, "k8v8", recent_window=64)
    found = of.generate(ids, past_key_values=cache, **GREEDY)
    assert found.shape == (2, 200 + STEPS)
    assert cache.get_seq_length() == 200 + STEPS - 1
    again = QuantizedCache(of.config, "k8v8", recent_window=64)
    assert torch.equal(of.generate(ids, past_key_values=again, **GREEDY), found)
    cache.reset()
    assert (cache.get_seq_length(), cache.nbytes) == (0, 0)
    assert torch.equal(of.generate(ids, past_key_values=cache, **GREEDY), found)


@pytest.mark.parametrize("attention", ["sdpa", "auraflux"])
def test_a_batch_with_padding(attention: str):
    of, ids, mask = model(attention), tokens(2, 260), torch.ones(2, 260, dtype=torch.long)
    mask[0, :100] = 0
    expected = logits(model(), ids, DynamicCache(), 250, mask)
    found = logits(of, ids, QuantizedCache(of.config, "k8v8", recent_window=32), 250, mask)
    assert divergence(found, expected) < 1e-3
    # padding is not seen: other tokens there change nothing
    ids[0, :100] = 7
    torch.testing.assert_close(logits(of, ids, QuantizedCache(of.config, "k8v8", recent_window=32), 250, mask), found)


@pytest.mark.parametrize("attention", ["sdpa", "auraflux"])
def test_beam_search(attention: str):
    of, ids = model(attention), tokens(2, 200)
    options = {**GREEDY, "num_beams": 3, "num_return_sequences": 3, "return_dict_in_generate": True, "output_scores": True}
    expected = model().generate(ids, **options)
    found = of.generate(ids, past_key_values=QuantizedCache(of.config, "k8v8", recent_window=16), **options)
    torch.testing.assert_close(found.sequences_scores, expected.sequences_scores, rtol=0.02, atol=0.02)


def filled(length: int, batch: int = 2, **options: Any) -> QuantizedLayer:
    cache = QuantizedCache(model().config, "k4v4", sink_tokens=3, recent_window=32, **options)
    rows = torch.randn(2, batch, 2, length, 16, generator=torch.Generator().manual_seed(2))
    layer = cache.layers[0]
    layer.update(rows[0], rows[1])
    return layer


def test_rows_are_selected_and_repeated():
    order = torch.tensor([1, 1, 0])
    layer = filled(200)
    before = layer.states()
    layer.reorder_cache(order)
    for found, expected in zip(layer.states(), before, strict=True):
        torch.testing.assert_close(found, expected[order])
    layer.batch_select_indices(torch.tensor([True, False, True]))
    layer.batch_repeat_interleave(2)
    for found, expected in zip(layer.states(), before, strict=True):
        torch.testing.assert_close(found, expected[[1, 1, 0, 0]])


@pytest.mark.parametrize("keep", [0, 2, 3, 60, 64 + 3, 131, 160, 199, 200])
def test_crop(keep: int):
    layer = filled(200)
    before = layer.states()
    layer.crop(keep - 200)
    assert layer.get_seq_length() == keep
    for found, expected in zip(layer.states(), before, strict=True):
        torch.testing.assert_close(found, expected[:, :, :keep])
    new = torch.randn(2, 2, 100, 16)
    layer.update(new, new)
    assert layer.get_seq_length() == keep + 100
    torch.testing.assert_close(layer.states()[0][:, :, -20:], new[:, :, -20:])


def test_drafts_are_cropped():
    of = model("auraflux")
    ids = tokens(1, 20).repeat(1, 10)
    found = of.generate(ids, past_key_values=QuantizedCache(of.config, "k8v8"), prompt_lookup_num_tokens=3, **GREEDY)
    assert torch.equal(found, of.generate(ids, past_key_values=QuantizedCache(of.config, "k8v8"), **GREEDY))


def test_sliding_windows_stay_as_they_are():
    of, ids = sliding_model(), tokens(2, 200 + STEPS)
    cache = QuantizedCache(of.config, "k8v8", recent_window=32)
    assert [type(layer) for layer in cache.layers] == [DynamicSlidingWindowLayer, QuantizedLayer]
    expected = logits(of, ids, DynamicCache(config=of.config), 200)
    assert 0 < divergence(logits(of, ids, cache, 200), expected) < 1e-3
    assert cache.layers[0].keys.shape[2] == 31


def test_refusals():
    config = model().config
    for options, message in (
        ({"kv": "none"}, "quantizes nothing"),
        ({"kv": "k5v4"}, "not supported"),
        ({"recent_window": 0}, "at least 0 and 1"),
    ):
        with pytest.raises(SettingsError, match=message):
            QuantizedCache(config, **options)
    sliding = sliding_model().config
    sliding.layer_types = ["sliding_attention"] * 2
    with pytest.raises(SettingsError, match="nothing to quantize"):
        QuantizedCache(sliding)
    layer = filled(10)
    with pytest.raises(InputError, match="2 sequences; it was given 3"):
        layer.update(torch.zeros(3, 2, 1, 16), torch.zeros(3, 2, 1, 16))
    with pytest.raises(InputError, match="negative"):
        layer.crop(5)
    with pytest.raises(AurafluxError, match="16 channels and values 8"):
        QuantizedCache(config).update(torch.zeros(1, 2, 1, 16), torch.zeros(1, 2, 1, 8), 0)
    with pytest.raises(SettingsError, match="offloaded"):
        layer.offload()


@pytest.mark.gpu
@pytest.mark.parametrize("kv", ["k8v8", "k4v4", "k3v2"])
def test_on_a_gpu(kv: str):
    ids = tokens(3, 400).cuda()
    expected = logits(model().cuda(), ids, DynamicCache(), 390)
    found = [
        logits(of, ids, QuantizedCache(of.config, kv, sink_tokens=5), 390) for of in (model().cuda(), model("auraflux").cuda())
    ]
    torch.testing.assert_close(found[1], found[0], rtol=1e-2, atol=1e-2)
    assert divergence(found[1], expected) < {"k8v8": 2e-3, "k4v4": 0.1, "k3v2": 1.0}[kv]
    layer = QuantizedCache(model().config, kv).layers[0]
    rows = torch.randn(2, 2, 2, 300, 16, device="cuda")
    layer.update(rows[0], rows[1])
    before = layer.states()
    layer.reorder_cache(torch.tensor([1, 0], device="cuda"))
    for now, then in zip(layer.states(), before, strict=True):
        torch.testing.assert_close(now, then.flip(0))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_smollm2():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = locate()
    of = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    text = " ".join(f"{n} plus {n + 2} is {2 * n + 2}." for n in range(60))
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :600]
    prompt = ids.shape[1] - 40
    expected = logits(of, ids, DynamicCache(), prompt)
    for attention in ("sdpa", "auraflux"):
        of.set_attn_implementation(attention)
        for kv, limit in (("k8v8", 1e-3), ("k8v4", 0.02), ("k4v4", 0.1)):
            cache = QuantizedCache(of.config, kv)
            found = divergence(logits(of, ids, cache, prompt), expected)
            dense = ids.shape[1] * 30 * 2 * 3 * 64 * 4
            print(f"{attention} {kv}: KL {found:.2e}, {cache.nbytes / 1e6:.2f} MB of {dense / 1e6:.2f} MB")
            assert found < limit
