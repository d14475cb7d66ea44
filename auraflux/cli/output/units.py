"""Human-readable counts of bytes and parameters."""


def size(nbytes: int, digits: int = 2) -> str:
    """Format bytes in powers of 1000, as for disks, networks and caches."""
    return _in_units(nbytes, digits, (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)))


def memory_size(nbytes: int) -> str:
    """Format bytes in powers of 1024, as for memory."""
    return _in_units(nbytes, 1, (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)))


def _in_units(nbytes: int, digits: int, units: tuple[tuple[str, int], ...]) -> str:
    for unit, factor in units:
        if nbytes >= factor:
            return f"{nbytes / factor:.{digits}f} {unit}"
    return f"{nbytes} B"


def count(number: int) -> str:
    """Format a count in powers of 1000."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return str(number)
