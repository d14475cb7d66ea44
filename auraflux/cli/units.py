"""Bytes as people read them."""


def size(nbytes: int, digits: int = 2) -> str:
    """In units of a thousand, as disks, links and caches are counted."""
    return _in_units(nbytes, digits, (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)))


def memory_size(nbytes: int) -> str:
    """In units of 1024, as memory is."""
    return _in_units(nbytes, 1, (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)))


def _in_units(nbytes: int, digits: int, units: tuple[tuple[str, int], ...]) -> str:
    for unit, factor in units:
        if nbytes >= factor:
            return f"{nbytes / factor:.{digits}f} {unit}"
    return f"{nbytes} B"
