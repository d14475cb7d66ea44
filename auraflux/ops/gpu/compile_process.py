"""Processes that compile kernel variants into Triton's cache: `CompileProcess` starts them, and this module is what they run.

Triton's frontend is Python, so threads of one process compile hardly faster than one. One helper process imports the kernels
once and forks a worker per core; variants and results travel through its pipes. It is a program of its own rather than a
child of `multiprocessing`, which would run the main module of the caller again.
"""

import hashlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import sysconfig
import threading
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import IO, Any, NamedTuple

from auraflux.errors import BackendError
from auraflux.ops._dispatch import all_ops

NICE = 5  # the process that waits for the kernels goes on meanwhile


class Compiled(NamedTuple):
    """Outcome of one variant.

    name   of the kernel if it was compiled; None if it was found in Triton's cache
    error  why it was not compiled
    """

    name: str | None = None
    error: str | None = None


class CompileProcess:
    """Compiles variants on several cores; end it by `close`.

    workers  processes that compile
    """

    def __init__(self, workers: int):
        self._lock, self._futures, self._count = threading.Lock(), dict[int, Future[Compiled]](), 0
        command = [sys.executable, "-m", "auraflux.ops.gpu.compile_process", str(workers)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        # in a session of its own: Ctrl-C ends this process, which closes the pipe
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
        )
        self._receiver = threading.Thread(target=self._receive, name="auraflux-compile", daemon=True)
        self._receiver.start()

    def submit(self, variant: Any) -> "Future[Compiled]":
        """Compile a variant (`KernelVariant`); raise BackendError if the process has ended."""
        message, future = pickle.dumps(variant), Future[Compiled]()
        assert self._process.stdin is not None
        with self._lock:
            self._count += 1
            self._futures[self._count] = future
            try:
                pickle.dump((self._count, message), self._process.stdin)
                self._process.stdin.flush()
            except OSError as err:
                self._futures.pop(self._count, None)
                raise BackendError(f"the process that compiles kernels has ended: {err}.") from err
        return future

    def close(self) -> None:
        """End the process; variants that are still compiled are dropped."""
        assert self._process.stdin is not None
        with self._lock, suppress(OSError):
            self._process.stdin.close()
        # with its workers, which may be compiling
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._receiver.join()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _receive(self) -> None:
        assert self._process.stdout is not None
        try:
            while True:
                number, name, error = pickle.load(self._process.stdout)
                with self._lock:
                    future = self._futures.pop(number)
                future.set_result(Compiled(name, error))
        except (EOFError, OSError, pickle.UnpicklingError):
            with self._lock:
                left, self._futures = list(self._futures.values()), {}
            for future in left:
                future.set_result(Compiled(error="the process that compiles kernels has ended"))


def compile_variant(message: bytes) -> Compiled:
    """Compile a pickled variant, and the C function that launches it, into Triton's cache."""
    from triton import knobs

    names: list[str] = []

    def listen(**event: Any) -> None:
        if not event["cache_hit"]:
            names.append(event["metadata"]["name"])

    knobs.compilation.listener = listen
    try:
        compiled = pickle.loads(message).compile()
        build_launcher(compiled.src, compiled.metadata)
    except Exception as err:
        return Compiled(error=f"{type(err).__name__}: {err}")
    return Compiled(names[0] if names else None)


def build_launcher(source: Any, metadata: Any) -> None:
    """Build the C function that launches a variant, unless Triton's cache has it or there is no GPU."""
    from triton.runtime import driver

    # without a GPU there is no driver
    with suppress(RuntimeError, AttributeError):
        driver.active.launcher_cls(source, metadata)


def has_launcher(source: Any, metadata: Any) -> bool:
    """Return whether Triton's cache has the C function that launches a variant; also True where there is no GPU."""
    from triton.backends.nvidia.driver import CudaDriver, make_launcher
    from triton.runtime import driver
    from triton.runtime.build import platform_key
    from triton.runtime.cache import get_cache_manager

    if not isinstance(driver._active, CudaDriver):
        return True
    code = make_launcher(source.constants, source.signature, getattr(metadata, "tensordesc_meta", None))
    key = hashlib.sha256(f"{code}{platform_key()}".encode()).hexdigest()
    return get_cache_manager(key).get_file(f"__triton_launcher{sysconfig.get_config_var('EXT_SUFFIX')}") is not None


def _serve(workers: int, requests: IO[bytes], results: IO[bytes]) -> None:
    """Compile what arrives until the pipe is closed."""
    for op in all_ops():
        op.kernel("cuda")
    lock = threading.Lock()

    def send(number: int, compiled: Compiled) -> None:
        with lock:
            # as a program this module has another name, so its classes cannot be sent
            pickle.dump((number, *compiled), results)
            results.flush()

    def fail(number: int, err: BaseException) -> None:
        send(number, Compiled(error=str(err)))

    with multiprocessing.get_context("fork").Pool(workers, os.nice, (NICE,)) as pool:
        while True:
            try:
                number, message = pickle.load(requests)
            except (EOFError, OSError):
                # the pool is terminated: nobody waits for the rest
                return
            pool.apply_async(compile_variant, (message,), callback=partial(send, number), error_callback=partial(fail, number))


if __name__ == "__main__":
    # what kernels print while they are compiled must not get between the results
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    _serve(int(sys.argv[1]), sys.stdin.buffer, output)
