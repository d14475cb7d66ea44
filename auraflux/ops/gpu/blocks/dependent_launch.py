"""Programmatic dependent launch, for kernels that also run on GPUs without it.

A kernel that is launched early waits for the previous one with `gdc_wait`, and lets the next one begin with
`gdc_launch_dependents`. GPUs before Hopper launch kernels one after the other: there both are compiled to nothing, and `launch`
drops the option `launch_pdl`.
"""

from typing import Any

from triton.language import core

LAUNCHES_EARLY = (9, 0)  # the first compute capability with griddepcontrol


@core.builtin
def launches_early(_semantic: Any = None) -> Any:
    """Return whether the GPU that a kernel is compiled for has griddepcontrol, as a constant."""
    architecture = "".join(each for each in _semantic.builder.options.arch if each.isdigit())
    return core.constexpr(divmod(int(architecture), 10) >= LAUNCHES_EARLY)


@core.extern
def gdc_wait(_semantic: Any = None) -> None:
    """Wait until the previous kernel has ended and its stores are visible."""
    _execute("griddepcontrol.wait; // dummy $0", _semantic)


@core.extern
def gdc_launch_dependents(_semantic: Any = None) -> None:
    """Let the next kernel begin; it must wait itself before it reads what this one writes."""
    _execute("griddepcontrol.launch_dependents; // dummy $0", _semantic)


def _execute(text: str, semantic: Any) -> None:
    # the same text and options as in Triton's own functions
    if launches_early(_semantic=semantic).value:
        core.inline_asm_elementwise(text, "=r", [], dtype=core.int32, is_pure=False, pack=1, _semantic=semantic)
