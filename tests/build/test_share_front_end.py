"""One front-end pass for several cubins: what `share-front-end` makes is what the long spelling makes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hatch_cuda_aot.manifest import manifest_files
from hatch_cuda_aot.results import ModuleResult
from hatch_cuda_aot.toolchain import Toolchain
from tests.build import _functions as remote
from tests.build.conftest import Compiler

SOURCE = """\
#if __CUDA_ARCH__ >= 860
__device__ float factor(float x) { return x * 3.0f; }
#else
__device__ float factor(float x) { return sqrtf(x); }
#endif
extern "C" __global__ void k(float* x, int* arch) { *x = factor(*x); *arch = __CUDA_ARCH__; }
"""


def test_shared_per_major(compiler: Compiler, tmp_path: Path) -> None:
    """Cubins of a major version are those of its lowest architecture's pass: code for a higher one is compiled away."""
    (tmp_path / "pkg").mkdir()
    (tmp_path / "k.cu").write_text(SOURCE)

    def build(archs: list[str], sharing: str) -> ModuleResult:
        table: dict[str, Any] = {"sources": ["k.cu"], "archs": archs, "cuda": compiler.line, "share-front-end": sharing}
        (module,) = compiler.call(remote.build, tmp_path, table, "pkg")
        return module  # type: ignore[no-any-return]

    plain = ["sm_80", "sm_86", "sm_90", "sm_90a", "compute_86"]
    shared = build(plain, "major")
    assert shared == build(["sm_80", "sm_86@compute_80", "sm_90", "sm_90a", "compute_86"], "none")
    own = {str(image.arch): image for image in build(plain, "none").images}
    images = {str(image.arch): image for image in shared.images}
    assert [name for name in images if images[name] != own[name]] == ["sm_86"]
    assert remote.code_of(images["sm_86"].data) != remote.code_of(own["sm_86"].data)

    toolchain = Toolchain(compiler.line, "", "", "", "", (), ())
    table = json.loads(manifest_files("pkg", [shared], toolchain, "0")["k.json"])
    assert {image["arch"]: image["virtual"] for image in table["images"]} == {
        "sm_80": "compute_80",
        "sm_86": "compute_80",
        "sm_90": "compute_90",
        "sm_90a": "compute_90a",
        "compute_86": "compute_86",
    }
