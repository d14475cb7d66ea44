"""Inputs for expert MLPs: few and many tokens, crowded and empty experts, blobs, biases, dense stacks."""

from dataclasses import replace

import torch

from auraflux.ops._cases import Args, Case
from auraflux.ops.linear._inputs import grid
from auraflux.ops.moe.experts import Clamp, Experts, Gelu, Limit, ReluSquare, SharedExpert, blob_of
from auraflux.ops.moe.reference import expert_mlp, expert_parts, mixture, sum_parts
from auraflux.ops.moe.routing import Routing
from auraflux.ops.simd.isa import ISA
from auraflux.quant import QTensor, grids, quantize

BF16 = torch.bfloat16
FAST = 2e-2  # two consecutive matmuls with rounded activations


def stack(
    experts: int, rows: int, width: int, bits: int, group: int = 64, lanes: int = ISA.lanes, kind: str = "affine"
) -> QTensor:
    return quantize((torch.randn(experts, rows, width) / width**0.5).to(BF16), bits, group, kind).interleave(lanes)


def matrices(
    experts: int, hidden: int, inner: int, bits: int = 4, down_bits: int | None = None, **options
) -> dict[str, QTensor]:
    gate, up = stack(experts, inner, hidden, bits, **options), stack(experts, inner, hidden, bits, **options)
    return {"gate": gate, "up": up, "down": stack(experts, hidden, inner, down_bits or bits, **options)}


def layer(*shape: int, **options) -> Experts:
    made = matrices(*shape, **options)
    return Experts(made["gate"], made["up"], made["down"])


def grid_layer(experts: int, hidden: int, inner: int, kind: str) -> Experts:
    """Return experts in a grid format."""

    def one(rows: int, width: int) -> QTensor:
        made = grid(experts * rows, width, kind, lanes=1)
        packed, scales = (part.view(experts, rows, -1) for part in (made.packed, made.scales))
        return replace(made, packed=packed, scales=scales, shape=(experts, rows, width))

    gate, up, down = (one(*shape).interleave(ISA.lanes) for shape in ((inner, hidden), (inner, hidden), (hidden, inner)))
    return Experts(gate, up, down)


def ungated(made: Experts) -> Experts:
    """Return the experts without a gate projection."""
    return replace(made, gate=None, activation=ReluSquare())


def uneven(experts: int, hidden: int, inner: int) -> Experts:
    """Return experts with a 4-bit gate and an 8-bit up projection."""
    return replace(layer(experts, hidden, inner), up=stack(experts, inner, hidden, 8))


def routed(tokens: int, k: int, experts: Experts, dtype: torch.dtype = torch.float32) -> Args:
    ids = torch.stack([torch.randperm(experts.count)[:k] for _ in range(tokens)]) if tokens else torch.empty(0, k)
    weights = torch.rand(tokens, k).softmax(-1)
    return {"x": torch.randn(tokens, experts.hidden).to(dtype), "ids": ids.int(), "weights": weights, "experts": experts}


def crowded(tokens: int, experts: Experts) -> Args:
    """Route all tokens to the same two experts."""
    return {**routed(tokens, 2, experts), "ids": torch.tensor([[3, 1]], dtype=torch.int32).repeat(tokens, 1)}


def leaning(args: Args) -> Args:
    """Replace each token's first expert by expert 0."""
    others = 1 + args["ids"] % (args["experts"].count - 1)
    return {**args, "ids": torch.cat([torch.zeros_like(others[:, :1]), others[:, 1:]], 1)}


def from_blobs(experts: int, hidden: int, inner: int) -> Experts:
    """Return a layer whose stacks are strided views over padded blobs."""
    stacks = matrices(experts, hidden, inner)
    parts = [{name: matrix[e] for name, matrix in stacks.items()} for e in range(experts)]
    blobs = [blob_of(part) for part in parts]
    rows = torch.zeros(experts, -(-len(blobs[0]) // 4096) * 4096, dtype=torch.uint8)
    for row, blob in zip(rows, blobs, strict=True):
        row[: len(blob)] = blob
    return Experts.from_blobs(rows, parts[0])


def gpt_oss(experts: int, hidden: int, inner: int) -> Experts:
    made = layer(experts, hidden, inner, group=32, kind="mxfp4")
    inner_bias, down_bias = torch.randn(2, experts, inner), torch.randn(experts, hidden)
    return replace(made, gate_bias=inner_bias[0], up_bias=inner_bias[1], down_bias=down_bias, activation=Clamp(1.702, 7.0))


def gemma(experts: int, hidden: int, inner: int) -> Experts:
    return replace(layer(experts, hidden, inner), activation=Gelu())


def dense_stack(experts: int, hidden: int, inner: int, dtype: torch.dtype) -> Experts:
    gate, up, down = (torch.randn(experts, *shape) / 8 for shape in ((inner, hidden), (inner, hidden), (hidden, inner)))
    return Experts(gate.to(dtype), up.to(dtype), down.to(dtype))


def touched(args: Args) -> int:
    """Return the bytes of the selected experts and of the tokens."""
    experts = args["experts"]
    size = sum(s.nbytes for s in experts.stacks) // experts.count
    return len(_met(args).unique()) * size + 2 * args["x"].nbytes


def flops(args: Args) -> int:
    return 2 * len(args["experts"].stacks) * _met(args).numel() * args["experts"].hidden * args["experts"].inner


def _met(args: Args) -> torch.Tensor:
    return args["ids"][args["ids"] >= 0]


def some(args: Args, missing: list[int]) -> Args:
    """Mask missing experts in `ids`; their entries in `parts` must not change."""
    ids = torch.where(torch.isin(args["ids"], torch.tensor(missing, dtype=torch.int32)), -1, args["ids"])
    parts = torch.randn(*ids.shape, args["experts"].hidden)
    return {"x": args["x"], "ids": ids, "experts": args["experts"], "parts": parts}


def results(tokens: int, k: int, width: int, dtype: torch.dtype = torch.float32) -> Args:
    return {"parts": torch.randn(tokens, k, width), "weights": torch.rand(tokens, k).softmax(-1), "dtype": dtype}


def scored(tokens: int, k: int, experts: Experts, dtype: torch.dtype = torch.float32, shared: bool = True) -> Args:
    """Return tokens with router scores, a residual stream and a shared expert's output."""
    x, h, shared_output = torch.randn(3, tokens, experts.hidden).to(dtype)
    args = {"x": x, "scores": torch.randn(tokens, experts.count).to(dtype), "routing": Routing(k, "softmax", True)}
    gate = torch.randn(tokens).to(dtype)
    return {**args, "experts": experts, "h": h} | ({"shared": shared_output, "shared_gate": gate} if shared else {})


def by_sigmoid(args: Args) -> Args:
    """Switch the call to sigmoid scoring with a bias."""
    bias = torch.randn(args["experts"].count) * 0.1
    return {**args, "routing": Routing(args["routing"].k, "sigmoid", True, scale=1.5), "bias": bias}


def of_chosen(args: Args) -> Args:
    """Switch the call to softmax over the selected experts only."""
    return {**args, "routing": Routing(args["routing"].k, "chosen", True)}


def shared_by_weights(args: Args, inner: int, ungated: bool = False) -> Args:
    """Pass the shared expert as weights instead of as its output."""
    one = layer(1, args["experts"].hidden, inner)
    gate, up, down = (stack[0] for stack in one.stacks)
    return {**args, "shared": SharedExpert(None if ungated else gate, up, down)}


def case(name: str, make, **options) -> Case:
    return Case(expert_mlp, name, make, nbytes=touched, flops=flops, **options)


def part(name: str, make, **options) -> Case:
    return Case(expert_parts, name, make, nbytes=touched, flops=flops, **options)


EXPERT_CASES = [
    case("one-token", lambda: routed(1, 8, layer(32, 2048, 768)), exact=False, tol=FAST, bench=True),
    case("64-tokens", lambda: routed(64, 8, layer(16, 1024, 512)), exact=False, tol=FAST, bench=True),
    *(
        case(
            f"one-token-{kind}",
            lambda b=bits, g=group, k=kind: routed(1, 8, layer(16, 2048, 768, b, group=g, kind=k)),
            exact=False,
            tol=FAST,
            bench=True,
            slow=True,
        )
        for kind, bits, group in (("fp8", 8, 128), ("mxfp4", 4, 32), ("nvfp4", 4, 16))
    ),
    case("one-token-exact", lambda: routed(1, 3, layer(8, 128, 128))),
    case("few-tokens", lambda: routed(5, 2, layer(8, 128, 128))),
    case("every-expert", lambda: routed(3, 6, layer(6, 64, 128))),
    case("many-tokens", lambda: routed(70, 4, layer(9, 128, 64))),
    case("many-tokens-fast", lambda: routed(70, 4, layer(9, 128, 64)), exact=False, tol=FAST),
    case("more-than-at-once", lambda: routed(600, 2, layer(4, 64, 64))),
    case("crowded", lambda: crowded(40, layer(5, 64, 128))),
    case("mixed-bits", lambda: routed(3, 2, layer(4, 64, 128, down_bits=6))),
    case("uneven-bits", lambda: routed(3, 2, uneven(4, 64, 128))),
    case("row-order", lambda: routed(9, 3, layer(6, 64, 128, lanes=1))),
    case("blobs", lambda: routed(9, 3, from_blobs(6, 64, 128))),
    case("mxfp4-biases-clamp", lambda: routed(9, 3, gpt_oss(6, 64, 96))),
    case("gelu", lambda: routed(9, 3, gemma(6, 64, 128))),
    case("limited", lambda: routed(9, 3, replace(layer(6, 64, 128), activation=Limit(0.5)))),
    case("gate-limited", lambda: routed(9, 3, replace(layer(6, 64, 128), activation=Limit(0.5, 0.75)))),
    case("many-limited", lambda: routed(40, 3, replace(layer(6, 64, 128), activation=Limit(0.5)))),
    case("many-gelu", lambda: routed(40, 3, gemma(6, 64, 128))),
    case("ungated", lambda: routed(9, 3, ungated(layer(6, 64, 128)))),
    case("ungated-one-token", lambda: routed(1, 3, ungated(layer(6, 64, 192)))),
    case("many-ungated", lambda: routed(40, 3, ungated(layer(6, 64, 128, down_bits=8)))),
    case("ungated-dense", lambda: routed(9, 3, ungated(dense_stack(6, 63, 100, BF16)))),
    case("nvfp4", lambda: routed(9, 3, layer(6, 64, 96, 4, group=16, kind="nvfp4"))),
    case("q6k", lambda: routed(9, 3, layer(6, 64, 96, 6, group=16, kind="centred"))),
    case("fp8", lambda: routed(9, 3, layer(6, 64, 128, 8, kind="fp8"))),
    *(
        case(f"many-{name}", lambda b=bits, o=options: routed(40, 3, layer(6, 64, 128, b, **o)))
        for name, bits, options in (
            ("nvfp4", 4, {"group": 16, "kind": "nvfp4"}),
            ("q6k", 6, {"group": 16, "kind": "centred"}),
            ("q3k", 3, {"group": 16, "kind": "centred"}),
            ("iq4", 4, {"group": 32, "kind": "iq4"}),
            ("iq4_nl", 4, {"group": 32, "kind": "iq4_nl"}),
            ("q4_0", 4, {"group": 32, "kind": "q4_0"}),
            ("fp8", 8, {"kind": "fp8"}),
        )
    ),
    *(
        case(f"{kind}-{tokens}", lambda k=kind, t=tokens: routed(t, 2, grid_layer(3, 256, 256, k)))
        for kind in grids.FORMATS
        for tokens in (2, 40)
    ),
    *(
        case(f"many-{kind}-bf16", lambda k=kind: routed(40, 2, grid_layer(3, 256, 256, k), BF16), tol=6e-3)
        for kind in ("iq2_xxs", "iq3_s", "iq1_m")
    ),
    case("dense-f32", lambda: routed(9, 3, dense_stack(6, 63, 100, torch.float32))),
    case("dense-bf16", lambda: routed(9, 3, dense_stack(6, 63, 100, BF16))),
    case("bf16", lambda: routed(3, 2, layer(4, 64, 128), BF16), tol=4e-3),
    case("many-mxfp4-biases-clamp", lambda: routed(40, 3, gpt_oss(6, 64, 96))),
    case("many-dense-f32", lambda: routed(40, 3, dense_stack(6, 63, 100, torch.float32))),
    case("many-dense-bf16", lambda: routed(40, 3, dense_stack(6, 63, 100, BF16))),
    case("many-blobs", lambda: routed(40, 3, from_blobs(6, 64, 128))),
    case("many-2-and-5-bits", lambda: routed(40, 2, layer(4, 64, 128, bits=2, down_bits=5))),
    case("many-3-and-8-bits", lambda: routed(40, 2, layer(4, 64, 128, bits=3, down_bits=8))),
    # the tensor-core kernels also round weights and intermediate results
    case("many-bf16", lambda: routed(40, 2, layer(4, 64, 128), BF16), tol=6e-3),
    case("quads-bf16", lambda: routed(2, 3, layer(8, 512, 256), BF16), tol=6e-3),
    # more inputs than the warps of a program hold at a time
    case("wide-quads-bf16", lambda: routed(2, 3, layer(4, 2304, 256), BF16), tol=6e-3),
    case("deep-quads-bf16", lambda: routed(1, 8, layer(8, 256, 2048), BF16), tol=6e-3),
    case("some-quads-bf16", lambda: routed(20, 4, layer(8, 512, 256), BF16), tol=6e-3),
    # blocks of 16 pairs, tiles of 128
    case("hundreds-bf16", lambda: routed(150, 2, layer(8, 512, 256), BF16), tol=6e-3),
    case("thousand-bf16", lambda: routed(150, 8, layer(16, 256, 256), BF16), tol=6e-3),
    # tiles of 32, 64 and 128 pairs on Hopper
    case("leaning-bf16", lambda: leaning(routed(259, 8, layer(96, 256, 256), BF16)), tol=6e-3),
    case("two-thousand-bf16", lambda: routed(301, 8, layer(48, 512, 256), BF16), tol=6e-3),
    case("thousands-bf16", lambda: routed(1030, 8, layer(12, 256, 768), BF16), tol=6e-3),
    case("no-tokens", lambda: routed(0, 2, layer(4, 64, 128))),
    part("one-token", lambda: some(routed(1, 8, layer(32, 2048, 768)), [3, 5]), exact=False, tol=FAST, bench=True),
    part("few-tokens", lambda: some(routed(5, 2, layer(8, 128, 128)), [1])),
    part("many-tokens", lambda: some(routed(70, 4, layer(9, 128, 64)), [0, 4, 8])),
    part("more-than-at-once", lambda: some(routed(600, 2, layer(4, 64, 64)), [2])),
    part("everyone", lambda: some(routed(9, 3, layer(6, 64, 128, lanes=1)), [])),
    part("nobody", lambda: some(routed(9, 3, layer(6, 64, 128)), list(range(6)))),
    part("blobs", lambda: some(routed(40, 3, from_blobs(6, 64, 128)), [2, 3])),
    part("mxfp4-biases-clamp", lambda: some(routed(40, 3, gpt_oss(6, 64, 96)), [5])),
    part("ungated", lambda: some(routed(40, 3, ungated(layer(6, 64, 128))), [5])),
    part("dense-bf16", lambda: some(routed(9, 3, dense_stack(6, 63, 100, BF16)), [0])),
    part("bf16", lambda: some(routed(3, 2, layer(4, 64, 128), BF16), [0])),
    part("many-bf16", lambda: some(routed(40, 2, layer(4, 64, 128), BF16), [3]), tol=6e-3),
    part("quads-bf16", lambda: some(routed(2, 3, layer(8, 512, 256), BF16), [3]), tol=6e-3),
    part("some-quads-bf16", lambda: some(routed(20, 4, layer(8, 512, 256), BF16), [3]), tol=6e-3),
    part("two-thousand-bf16", lambda: some(leaning(routed(259, 8, layer(96, 256, 256), BF16)), [3, 90]), tol=6e-3),
    part("thousands-bf16", lambda: some(routed(1030, 8, layer(12, 512, 256), BF16), [3]), tol=6e-3),
    part("no-tokens", lambda: some(routed(0, 2, layer(4, 64, 128)), [])),
    Case(sum_parts, "one-token", lambda: results(1, 8, 2048), bench=True),
    Case(sum_parts, "many-tokens", lambda: results(100, 8, 1024), bench=True),
    Case(sum_parts, "odd-width", lambda: results(7, 3, 333)),
    Case(sum_parts, "bf16", lambda: results(5, 4, 63, BF16), tol=4e-3),
    Case(sum_parts, "no-tokens", lambda: results(0, 2, 64)),
    Case(mixture, "few-tokens", lambda: scored(3, 2, layer(8, 128, 128))),
    Case(mixture, "many-tokens", lambda: scored(70, 4, layer(9, 128, 64), shared=False)),
    Case(mixture, "many-shared", lambda: scored(40, 4, layer(9, 128, 64))),
    # pairs in blocks on Hopper
    Case(mixture, "some-tokens", lambda: scored(12, 8, layer(16, 512, 256), BF16), tol=8e-3),
    Case(mixture, "some-deep", lambda: scored(9, 6, layer(12, 256, 768), BF16, shared=False), tol=8e-3),
    Case(mixture, "some-wide", lambda: scored(40, 2, layer(40, 2304, 256), BF16), tol=8e-3),
    Case(mixture, "some-crowded", lambda: scored(100, 2, layer(4, 512, 512), BF16), tol=8e-3),
    Case(mixture, "some-by-sigmoid", lambda: by_sigmoid(scored(33, 3, layer(40, 512, 256), BF16)), tol=8e-3),
    Case(mixture, "some-of-chosen", lambda: of_chosen(scored(12, 4, layer(9, 512, 256), BF16)), tol=8e-3),
    Case(mixture, "some-shared-weights", lambda: shared_by_weights(scored(9, 8, layer(16, 512, 256), BF16), 256), tol=8e-3),
    Case(mixture, "thousands-bf16", lambda: scored(1030, 8, layer(12, 256, 256), BF16), tol=8e-3),
    Case(mixture, "bf16", lambda: scored(2, 8, layer(16, 512, 256), BF16), tol=8e-3),
    Case(mixture, "one-token-bf16", lambda: scored(1, 8, layer(16, 2048, 768), BF16, shared=False), tol=8e-3),
    Case(mixture, "sigmoid-bf16", lambda: by_sigmoid(scored(2, 3, layer(40, 512, 256), BF16)), tol=8e-3),
    Case(mixture, "shared-weights", lambda: shared_by_weights(scored(3, 2, layer(8, 128, 128)), 64)),
    Case(mixture, "ungated", lambda: shared_by_weights(scored(3, 2, ungated(layer(8, 128, 64))), 128, ungated=True)),
    Case(mixture, "shared-weights-bf16", lambda: shared_by_weights(scored(2, 8, layer(16, 512, 512), BF16), 512), tol=8e-3),
    Case(mixture, "wide-shared-bf16", lambda: shared_by_weights(scored(2, 8, layer(16, 512, 256), BF16), 512), tol=8e-3),
    Case(mixture, "widest-bf16", lambda: scored(1, 2, layer(8, 7168, 2048), BF16, shared=False), tol=8e-3, slow=True),
    Case(mixture, "no-tokens", lambda: scored(0, 2, layer(4, 64, 128))),
]
