"""Commands run as with a filled JIT cache: an empty one adds a note to stderr, before the errors that tests compare."""

import pytest


@pytest.fixture(autouse=True)
def filled_jit_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("auraflux.ops.simd.compile.cache_folder.is_cache_empty", lambda: False)
