"""Cached launches: the compiled kernel that Triton would use, and a new one where Triton would compile anew."""

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from auraflux.ops.gpu import launch  # noqa: E402
from auraflux.ops.gpu.launch import Launcher, redirect_launches  # noqa: E402


class Driver:
    device, stream = 0, 77

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return self.stream


class Recorded:
    """A launcher of a kernel that records compilations and launches."""

    def __init__(self, kernel: Any):
        self.built: list[dict[str, Any]] = []
        self.launched: list[tuple[Any, ...]] = []
        kernel.run = self.build
        self.launch = Launcher(kernel)

    def build(self, *args: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        self.built.append({"args": args, "grid": grid, **named})

        def run(*given: Any) -> None:
            self.launched.append(given)

        return SimpleNamespace(run=run, function="f", packed_metadata="m")

    @property
    def counts(self) -> tuple[int, int]:
        """Calls that went to Triton, and those that went straight to a compiled kernel."""
        return len(self.built), len(self.launched)

    def __call__(self, *args: Any, grid: Any = (3,), **named: Any) -> None:
        self.launch(grid, *args, **named)


def add(x, y, n, factor, BLOCK: tl.constexpr, WIDE: tl.constexpr = False):
    pass


class Sides(NamedTuple):
    x: Any
    y: Any
    n: Any = 48


class Others(NamedTuple):
    x: Any
    y: Any
    n: Any = 48


class Tile(NamedTuple):
    rows: int
    wide: bool


def add_sides(sides, factor, TILE: tl.constexpr):
    pass


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=Driver()))
    return Recorded(triton.runtime.jit.JITFunction(add))


@pytest.fixture
def tupled(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=Driver()))
    return Recorded(triton.runtime.jit.JITFunction(add_sides))


X, Y = torch.zeros(64), torch.zeros(64, dtype=torch.bfloat16)


def test_a_second_call_goes_straight_to_the_compiled_kernel(kernel: Recorded):
    kernel(X, Y, 48, 0.5, BLOCK=16, num_warps=4)
    other = Y.float()
    kernel(other, Y, 48, 0.5, BLOCK=16, num_warps=4, grid=(5, 2))
    assert kernel.counts == (1, 1)
    (x, y, z, stream, function, metadata, *hooks), values = kernel.launched[0][:9], kernel.launched[0][9:]
    assert (x, y, z, stream, function, metadata, hooks) == (5, 2, 1, Driver.stream, "f", "m", [None] * 3)
    assert values == (other.data_ptr(), Y.data_ptr(), 48, 0.5, 16, False)


def test_a_launcher_of_triton_is_called_without_what_surrounds_it(kernel: Recorded, monkeypatch: pytest.MonkeyPatch):
    seen = []

    class Own:
        """A kernel as Triton compiles it, without compiling."""

        launch_cooperative_grid, launch_pdl, profile_scratch_size = False, True, 0
        global_scratch_size = 0

        def __call__(self, *given):
            seen.append(("around", *given))

        def launch(self, *given):
            seen.append(("straight", *given))

    monkeypatch.setattr(launch, "CudaLauncher", Own)
    monkeypatch.setattr(
        kernel.launch, "_run", lambda *args, **named: SimpleNamespace(run=Own(), function="f", packed_metadata="m")
    )
    for scratch in (0, 256):
        monkeypatch.setattr(Own, "global_scratch_size", scratch)
        for _ in range(2):
            kernel(X, Y, 48, 0.5, BLOCK=16 + scratch)
    arguments = X.data_ptr(), Y.data_ptr(), 48, 0.5
    fixed = 3, 1, 1, Driver.stream, "f"
    assert seen == [
        ("straight", *fixed, False, True, None, None, "m", None, None, None, *arguments, 16, False),
        ("around", *fixed, "m", None, None, None, *arguments, 272, False),
    ]


def test_the_cache_of_calls_is_bounded(kernel: Recorded, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launch, "MAX_CACHED", 2)
    for n in (48, 64, 80, 48, 80):
        kernel(X, Y, n, 0.5, BLOCK=16)
    assert kernel.counts == (4, 1)


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ((X.bfloat16(), Y, 48, 0.5), {}),
        ((X[1:], Y, 48, 0.5), {}),
        ((None, Y, 48, 0.5), {}),
        ((X, Y, 47, 0.5), {}),
        ((X, Y, 48, 0.25), {}),
        ((X, Y, 1, 0.5), {}),
        ((X, Y, 1 << 36, 0.5), {}),
        ((X, Y, (1 << 36) + 1, 0.5), {}),
        ((X, Y, 48, 1), {}),
        ((X, Y, 48, 0.5), {"BLOCK": 32}),
        ((X, Y, 48, 0.5), {"WIDE": True}),
        ((X, Y, 48, 0.5), {"WIDE": 0}),
        ((X, Y, 48, 0.5), {"num_warps": 8}),
        ((X, Y, 48, 0.5), {"launch_pdl": True}),
    ],
)
def test_calls_of_other_variants_have_other_keys(kernel: Recorded, args: tuple[Any, ...], named: dict[str, Any]):
    usual = {"BLOCK": 16, "num_warps": 4}
    kernel(X, Y, 48, 0.5, **usual)
    kernel(*args, **usual | named)
    assert kernel.counts == (2, 0)
    kernel(*args, **usual | named)
    assert kernel.counts == (2, 1)


def test_nested_tuples_are_passed_on(tupled: Recorded):
    for _ in range(2):
        tupled(Sides(X, Sides(Y, None)), 0.5, Tile(16, True))
    assert tupled.counts == (1, 1)
    assert tupled.launched[0][9:] == ([X.data_ptr(), [Y.data_ptr(), None, 48], 48], 0.5, [16, True])


@pytest.mark.parametrize(
    ("sides", "tile"),
    [
        (Sides(X.bfloat16(), Y), Tile(16, True)),
        (Sides(X[1:], Y), Tile(16, True)),
        (Sides(X, Y[1:]), Tile(16, True)),
        (Sides(X, None), Tile(16, True)),
        (Sides(X, Y, 47), Tile(16, True)),
        (Sides(X, Sides(Y, None)), Tile(16, True)),
        (Others(X, Y), Tile(16, True)),
        ((X, Y, 48), Tile(16, True)),
        ((X, Y), Tile(16, True)),
        (None, Tile(16, True)),
        (Sides(X, Y), Tile(32, True)),
        (Sides(X, Y), Tile(16, 1)),
    ],
)
def test_members_of_tuples_are_part_of_the_key(tupled: Recorded, sides: Any, tile: Tile):
    tupled(Sides(X, Y), 0.5, Tile(16, True))
    tupled(sides, 0.5, tile)
    assert tupled.counts == (2, 0)
    tupled(sides, 0.5, tile)
    assert tupled.counts == (2, 1)


def test_devices_have_separate_compiled_kernels(kernel: Recorded, monkeypatch: pytest.MonkeyPatch):
    kernel(X, Y, 48, 0.5, BLOCK=16)
    monkeypatch.setattr(Driver, "device", 1)
    kernel(X, Y, 48, 0.5, BLOCK=16)
    assert kernel.counts == (2, 0)


def test_how_constants_are_given_does_not_matter(kernel: Recorded):
    kernel(X, Y, 48, 0.5, BLOCK=16)
    kernel(X, Y, 48, 0.5, 16)
    kernel(X, Y, n=48, factor=0.5, WIDE=False, BLOCK=16)
    assert kernel.counts == (1, 2)


@pytest.mark.parametrize(("args", "named"), [((X, Y, 48, 0.5), {}), ((X, Y, 48, object()), {"BLOCK": 16}), ((X,) * 7, {})])
def test_unknown_arguments_are_left_to_triton(kernel: Recorded, args: tuple[Any, ...], named: dict[str, Any]):
    for _ in range(2):
        kernel(*args, **named)
    assert kernel.counts == (2, 0)
    assert kernel.built[0] == {"args": args, "grid": (3,), **named}


def test_a_profiler_sees_every_launch(kernel: Recorded, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launch.knobs.runtime.launch_enter_hook, "calls", [lambda metadata: None])
    for _ in range(2):
        kernel(X, Y, 48, 0.5, BLOCK=16)
    assert kernel.counts == (2, 0)


def test_only_a_known_version_of_triton_is_launched_so(monkeypatch: pytest.MonkeyPatch):
    calls: list[dict[str, Any]] = []
    for version, quick in (("4.0.0", False), ("3.6.1", True)):
        kernel = triton.runtime.jit.JITFunction(add)
        kernel.run = lambda *args, **named: calls.append(named)
        monkeypatch.setattr(triton, "__version__", version)
        launched = launch.launch(kernel, (3,))
        assert isinstance(launched.func, Launcher) is quick
        if not quick:
            launched(X, Y, 48, 0.5, BLOCK=16)
    assert calls == [{"grid": (3,), "warmup": False, "BLOCK": 16}]


def test_a_kernel_is_launched_by_the_same_launcher_again():
    kernel, other = (triton.runtime.jit.JITFunction(add) for _ in range(2))
    first, again, another = (launch.launch(each, (3,)).func for each in (kernel, kernel, other))
    assert first is again
    assert another is not first


def test_launches_can_be_redirected(kernel: Recorded):
    seen: list[Any] = []
    own = triton.runtime.jit.JITFunction(add)
    with redirect_launches(lambda *args, **named: seen.append((*args, named))):
        launch.launch(own, (3, 2))(X, Y, 48, 0.5, BLOCK=16)
    assert seen == [(own, (3, 2), X, Y, 48, 0.5, {"BLOCK": 16})]
    assert not isinstance(launch.launch(own, (3,)).func, type(lambda: None))


def test_a_description_is_the_one_that_triton_makes():
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = gl.NVMMASharedLayout.get_default_for([16, 64], gl.bfloat16)
    for rows in (64, 64, 128):
        x = torch.zeros(rows, 64, dtype=torch.bfloat16)
        wanted, found = TensorDescriptor.from_tensor(x, [16, 64], layout), launch.tensor_descriptor(x, [16, 64], layout)
        assert type(found) is TensorDescriptor
        assert found.base is x
        assert {name: list(value) for name, value in vars(found).items() if name in ("shape", "strides", "block_shape")} == {
            name: list(value) for name, value in vars(wanted).items() if name in ("shape", "strides", "block_shape")
        }
        assert (found.layout, found.padding) == (wanted.layout, wanted.padding)
        assert vars(found).keys() == vars(wanted).keys()
    with pytest.raises(AssertionError, match="aligned"):
        launch.tensor_descriptor(torch.zeros(64 * 64 + 1, dtype=torch.bfloat16)[1:].view(64, 64), [16, 64], layout)
