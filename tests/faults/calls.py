"""The fault injection library (calls.c), which makes the n-th call fail: building, preloading and controlling it."""

import ctypes
import errno
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("calls.c")
WRITES, REMOVALS, READS, MEMORY = 1, 2, 4, 8
ONCE, FROM_HERE, TORN, KILLED = range(4)
REMOVING = ("unlink", "unlinkat", "rmdir")


@dataclass(frozen=True)
class Fault:
    """A fault injected at the n-th call.

    kinds  calls that are counted
    how    the call fails, it and all later ones fail, it is half done, or the process is killed
    error  errno of the failure
    """

    kinds: int
    how: int
    error: int = 0


FAULTS = {
    "full": Fault(WRITES, FROM_HERE, errno.ENOSPC),
    "torn": Fault(WRITES, TORN, errno.ENOSPC),
    "broken": Fault(WRITES | REMOVALS, ONCE, errno.EIO),
    "denied": Fault(WRITES | REMOVALS, ONCE, errno.EACCES),
    "killed": Fault(WRITES | REMOVALS, KILLED),
    "unreadable": Fault(READS, ONCE, errno.EIO),
    "memory": Fault(MEMORY, ONCE, errno.ENOMEM),
}


def missing() -> str | None:
    """Return why fault injection is not available here, None if it is."""
    if not sys.platform.startswith("linux"):
        return "the library that makes calls fail is for Linux"
    return None if shutil.which("gcc") else "there is no gcc to build the library that makes calls fail"


def build(folder: Path) -> Path:
    """Compile the library."""
    made = folder / "calls.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", made, SOURCE, "-ldl"], check=True)
    return made


class Calls:
    """The library in a process that was started with it in LD_PRELOAD."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(os.environ["LD_PRELOAD"])
        self._library.faults_hit.restype = ctypes.c_char_p
        self._library.faults_disarm.restype = ctypes.c_long

    def arm(self, folder: Path, fault: Fault, at: int) -> None:
        """Fail the n-th call below a folder; with 0, only count calls."""
        path = ctypes.c_char_p(bytes(folder))
        self._library.faults_arm(path, fault.kinds, ctypes.c_long(at), fault.how, fault.error)

    def disarm(self) -> tuple[int, str]:
        """Return the number of calls and the name of the failed one."""
        count = self._library.faults_disarm()
        return count, self._library.faults_hit().decode()
