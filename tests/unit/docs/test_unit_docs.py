"""The documentation says what the program does: generated pages are current, the schema fits, and links lead somewhere."""

from __future__ import annotations

import builtins
import importlib
import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from hatch_cuda_aot.compile.ptx import Param, Variable
from hatch_cuda_aot.compile.tasks import Resources
from hatch_cuda_aot.manifest import manifest_files, tree_table
from hatch_cuda_aot.results import Image, Kernel, ModuleResult, PtxIsa, Source
from hatch_cuda_aot.runtime import errors
from hatch_cuda_aot.runtime.arch import Arch
from hatch_cuda_aot.runtime.manifest import INDEX
from hatch_cuda_aot.toolchain import LINES, Toolchain

jsonschema: Any = importlib.import_module("jsonschema")  # it ships no types

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]


def test_generated_pages_are_current() -> None:
    """What scripts/generate_reference.py writes is what is committed."""
    for path, text in runpy.run_path(str(ROOT / "scripts" / "generate_reference.py"))["render"]().items():
        assert path.read_text(encoding="utf-8") == text, f"{path}: run scripts/generate_reference.py"


def test_table_of_lines_has_its_generated_form() -> None:
    """scripts/generate_lines.py finds the table in toolchain.py, and writes it as it stands there."""
    script = runpy.run_path(str(ROOT / "scripts" / "generate_lines.py"))
    text = (ROOT / "hatch_cuda_aot" / "toolchain.py").read_text(encoding="utf-8")
    assert script["replace_table"](text, script["render"](list(LINES))) == text
    assert script["replace_table"](text, "other\n") != text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Each link to a file of the project finds the file, and the heading where it names one."""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.is_file(), target
        assert not anchor or anchor in headings(linked), target


def headings(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_errors_are_as_in_the_reference() -> None:
    """Each error of the page's table has the builtin, the code and the attributes that stand there."""
    text = (DOCS / "reference" / "runtime.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+Error)` \| `(\w+)` \| `([\w-]+)` \| .* \| (.*) \|$", text, re.MULTILINE)
    assert len(rows) >= 5
    for name, builtin, code, attributes in rows:
        error = getattr(errors, name)
        assert issubclass(error, getattr(builtins, builtin))
        assert error.code == code
        assert set(re.findall(r"\w+", attributes)) <= set(vars(error("message")))


@pytest.fixture(scope="module")
def validator() -> Any:
    schema = json.loads((DOCS / "reference" / "manifest.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def manifest() -> dict[str, Any]:
    """Return the JSON files of a small build: two modules that share a kernel's name, images of every kind, one source."""
    taken = Resources(registers=10, shared=1024, local=8, spill_stores=4, spill_loads=4)
    real, family = Arch.parse("sm_90a"), Arch.parse("sm_100f")
    front, old = Arch.parse("compute_90a"), Arch.parse("compute_75")
    kernels = (
        Kernel("axpy<float>", "_Z4axpyIfEvT_PKS0_PS0_x", (Param("f32", 4, 0), Param("u64", 8, 8))),
        Kernel("noop", "noop", ()),
        Kernel("scale", "_Z5scale6Vector", (Param("struct", 12, 0),)),
    )
    images = (
        Image(real, front, b"cubin", 13000, None, {"axpy<float>": taken, "noop": taken, "scale": Resources()}),
        Image(family, old, b"large" * 500_000, 12000, None, {"noop": taken}),
        Image(old, old, b"ptx", 12090, PtxIsa("8.8", "6.3", 10000), {"axpy<float>": None, "noop": None}),
    )
    variables = {"table": Variable("table", "const", 256, 4), "ns::count": Variable("_ZN2ns5countE", "global", 4, 4)}
    source = Source(
        "src/pkg/first.cu",
        ("--std=c++17", "--include-path=include"),
        ("-O2",),
        (("include/a..b.cuh", b""), ("src/pkg/first.cu", b"source")),
        ("axpy", "ns::axpy"),
    )
    modules = [
        ModuleResult("first", kernels, variables, images, (("first for sm_90a", "a warning"),), source),
        ModuleResult("second.x", kernels[1:2], {}, images[1:2], ()),
    ]
    toolchain = Toolchain(
        "13.5", "13.5.37", "13.5.37", "/somewhere/ptxas", "3003005", (("include", "/there"),), (75, 90)
    )
    tree = tree_table("../../..", dict(source.files), rebuild=True)
    files = manifest_files("pkg", modules, toolchain, "0.1.0", tree)
    return {name: json.loads(content) for name, content in files.items() if name.endswith(".json")}


@pytest.mark.parametrize("name", [INDEX, "first.json", "second.x.json"])
def test_manifest_fits_the_schema(validator: Any, name: str) -> None:
    """What the build writes is what the published schema describes."""
    validator.validate(manifest()[name])


@pytest.mark.parametrize(
    ("name", "change"),
    [
        (INDEX, lambda data: data.update(format=2)),
        (INDEX, lambda data: data.pop("toolchain")),
        (INDEX, lambda data: data["kernels"].update(noop=["first"])),
        (INDEX, lambda data: data["modules"]["first"].update(file="../first.json")),
        (INDEX, lambda data: data.update(unknown=1)),
        (INDEX, lambda data: data["tree"].pop("root")),
        (INDEX, lambda data: data["tree"]["files"].update({"/a.cuh": {"size": 0, "sha256": "0" * 64}})),
        ("first.json", lambda data: data["images"].clear()),
        ("first.json", lambda data: data["images"][0].update(arch="compute_90")),
        ("first.json", lambda data: data["images"][0].update(sha256="0")),
        ("first.json", lambda data: data["images"][0].update(ptx_version="8.8")),
        ("first.json", lambda data: data["images"][0]["kernels"]["noop"].pop("registers")),
        ("first.json", lambda data: data["images"][0].update(ptx_floor="6.3")),
        ("first.json", lambda data: data["images"][2].update(ptx_version=None)),
        ("first.json", lambda data: data["images"][2].update(ptx_floor=None)),
        ("first.json", lambda data: data["images"][2].update(floor_driver=None)),
        ("first.json", lambda data: data["images"][2].pop("floor_driver")),
        ("first.json", lambda data: data["source"].pop("main")),
        ("first.json", lambda data: data["source"].update(folder="..")),
        ("first.json", lambda data: data["source"]["files"].clear()),
        ("first.json", lambda data: data["source"]["files"].update({"../a.cuh": {"size": 0, "sha256": "0" * 64}})),
        ("first.json", lambda data: data["source"]["files"]["src/pkg/first.cu"].pop("sha256")),
        ("first.json", lambda data: data["kernels"]["noop"].pop("symbol")),
        ("first.json", lambda data: data["kernels"]["scale"]["params"][0].update(kind="int")),
        ("first.json", lambda data: data["globals"]["table"].update(space="shared")),
    ],
)
def test_schema_refuses(validator: Any, name: str, change: Any) -> None:
    """The schema is no empty promise: each of these changes breaks it."""
    data = manifest()[name]
    change(data)
    with pytest.raises(jsonschema.ValidationError):
        validator.validate(data)
