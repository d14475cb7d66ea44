"""Calling compiled functions through their addresses.

Numba links a jitted function into each of its callers and optimises all of it again there. What depends on a format is compiled
by itself, once per format, and reached through its address; what does not is compiled only once. All arguments are integers.
"""

from numba import types
from numba.extending import intrinsic


def address_of(function, arguments):
    """Compile a jitted function of that many integers which returns nothing, and give the address of its code.

    The function must be kept: its code goes with it.
    """
    signature = (types.int64,) * arguments
    function.compile(signature)
    compiled = function.overloads[signature]
    return compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name)


@intrinsic
def call_at(typingctx, address, args):
    """Call the function at an address with a tuple of integers."""
    given = (types.int64,) * len(args)

    def codegen(context, b, signature, values):
        kind = context.call_conv.get_function_type(types.void, given)
        pointer = b.inttoptr(values[0], kind.as_pointer())
        parts = [b.extract_value(values[1], i) for i in range(len(given))]
        context.call_conv.call_function(b, pointer, types.void, given, parts)
        return context.get_dummy_value()

    return types.void(types.int64, types.UniTuple(types.int64, len(args))), codegen
