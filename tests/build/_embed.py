"""What the tests of embedded sources call in a compiler's environment: the run side, as an installed package has it."""

from __future__ import annotations

from hatch_cuda_aot.runtime.jit_cache import JitCache
from hatch_cuda_aot.runtime.manifest import Manifest
from hatch_cuda_aot.runtime.select import DeviceFacts
from hatch_cuda_aot.runtime.source import Compiled, SourceError, compile_kernel


def compile_from(folder: str, name: str, cc: int, driver: int) -> Compiled | str:
    """Compile a kernel from the source in `folder`, for a device that need not be there; what is said if that fails."""
    manifest = Manifest.read(folder)
    module = manifest.module("embed")
    symbol = "" if "<" in name else module.kernel(name).symbol
    cache = JitCache(None, "embed")
    try:
        return compile_kernel(folder, module, name, symbol, DeviceFacts(cc, driver), cache=cache, logger="embed")
    except SourceError as error:
        return str(error)
