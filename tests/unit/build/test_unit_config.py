"""The configuration: precedence, defaults, and the exact words of what can be wrong with it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hatch_cuda_aot.archs import EXPECTED
from hatch_cuda_aot.config import HOOK_TABLE, Config, ModuleConfig, load_config, load_settings
from hatch_cuda_aot.errors import ConfigError
from hatch_cuda_aot.keys import DEFAULT_ARCHS, KEYS, MODULE_KEYS, TABLE

#: A slow machine must not fail a test of hypothesis.
UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


SHIPPED = ("src/pkg",)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A project with one package, two sources and a folder of headers."""
    for file in ("src/pkg/__init__.py", "src/pkg/kernels/a.cu", "src/pkg/kernels/b.cu", "src/pkg/device/c.cuh"):
        add(tmp_path, file)
    return tmp_path


def add(root: Path, file: str) -> None:
    """Make an empty file."""
    (root / file).parent.mkdir(parents=True, exist_ok=True)
    (root / file).write_text("", encoding="utf-8")


def load(
    root: Path,
    table: Mapping[str, Any] | None = None,
    hook: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    packages: tuple[str, ...] = SHIPPED,
) -> Config:
    """Load a configuration; without a table, one that is good and minimal."""
    table = {"sources": ["src/pkg/kernels/*.cu"]} if table is None else table
    return load_config(root, table, hook or {}, packages, environ or {})


def problems(
    root: Path,
    table: Mapping[str, Any],
    hook: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    packages: tuple[str, ...] = SHIPPED,
) -> list[str]:
    """Return everything that is wrong with a configuration, as people see it, with the project's folder as ROOT."""
    with pytest.raises(ConfigError) as caught:
        load(root, table, hook, environ, packages)
    lines = [str(problem).replace(str(root), "ROOT") for problem in caught.value.problems]
    assert str(caught.value).replace(str(root), "ROOT") == "\n".join(lines)
    return lines


def with_sources(**keys: Any) -> dict[str, Any]:
    """Return a table with sources and other keys, ``_`` standing for the hyphen."""
    return {"sources": ["src/pkg/kernels/*.cu"], **{name.replace("_", "-"): value for name, value in keys.items()}}


def module(config: Config, name: str = "a") -> ModuleConfig:
    """Return a module by name."""
    return next(module for module in config.modules if module.name == name)


# What a configuration means


def test_minimal(root: Path) -> None:
    """One key is enough: each file is a module named after its stem, everything else has its documented default."""
    config = load(root)
    assert (config.package, config.package_dir, config.cuda, config.jobs) == ("pkg", "src/pkg", "auto", None)
    assert [(module.name, module.sources, module.kernels) for module in config.modules] == [
        ("a", ("src/pkg/kernels/a.cu",), ()),
        ("b", ("src/pkg/kernels/b.cu",), ()),
    ]
    settings = module(config).settings
    assert [str(target) for item in settings.archs for target in item] == list(DEFAULT_ARCHS)
    assert (settings.include_dirs, settings.std, settings.defines) == ((), "c++17", ())
    assert (settings.prune, settings.lineinfo, settings.debug) == (True, False, False)
    assert config.warnings == ()


def test_every_compile_key(root: Path) -> None:
    """Each compile key reaches the settings, in the form that the build uses."""
    config = load(
        root,
        with_sources(
            archs=["sm_90", "all"],
            cuda="13",
            include_dirs=["src/pkg/device", "./src/pkg/"],
            std="c++20",
            defines={"UNROLL": 4, "NAME": "x", "RATE": 0.5, "ON": True, "OFF": False},
            options=["--use_fast_math", "-Xptxas=-O1"],
            prune=False,
            lineinfo=True,
            jobs=3,
        ),
    )
    settings = module(config).settings
    assert settings.archs[1] == "all"
    assert (config.cuda, config.jobs) == ("13", 3)
    assert settings.include_dirs == ("src/pkg/device", "src/pkg")
    assert settings.std == "c++20"
    assert settings.defines == (("NAME", "x"), ("ON", "1"), ("RATE", "0.5"), ("UNROLL", "4"))
    assert (settings.options.nvrtc, settings.options.ptxas) == (("--use_fast_math",), ("-O1",))
    assert (settings.prune, settings.lineinfo) == (False, True)


def test_debug_prunes_nothing(root: Path) -> None:
    """``debug`` keeps everything and has its own line information, whatever the other keys say."""
    settings = module(load(root, with_sources(debug=True, prune=True, lineinfo=True))).settings
    assert (settings.debug, settings.prune, settings.lineinfo) == (True, False, False)


def test_paths_inside_are_relative(root: Path) -> None:
    """Absolute paths into the project and roundabout ones mean the same files, by paths relative to the project."""
    table = with_sources(include_dirs=[str(root / "src/pkg/device"), "src/../src/pkg"])
    table["sources"] = [str(root / "src/pkg/kernels/a.cu"), "src/pkg/device/../kernels/b.cu"]
    config = load(root, table)
    assert [module.sources for module in config.modules] == [("src/pkg/kernels/a.cu",), ("src/pkg/kernels/b.cu",)]
    assert module(config).settings.include_dirs == ("src/pkg/device", "src/pkg")


def test_precedence(root: Path) -> None:
    """The hook table wins over ``[tool.cuda-aot]`` and the environment over both, key by key."""
    table = with_sources(std="c++20", cuda="13.0", options=["--ftz=true"], jobs=2, prune=False)
    hook = {"cuda": "13.1", "options": ["--fmad=false"], "jobs": 3}
    config = load(root, table, hook, {"HATCH_CUDA_AOT_JOBS": "4", "HATCH_CUDA_AOT_OPTIONS": "--restrict"})
    settings = module(config).settings
    assert settings.std == "c++20"
    assert settings.prune is False
    assert config.cuda == "13.1"
    assert config.jobs == 4
    assert settings.options.nvrtc == ("--restrict",)


def test_a_list_replaces(root: Path) -> None:
    """A key's list replaces that of the table below, and never merges with it."""
    table = with_sources(archs=["sm_80", "sm_90"], defines={"A": 1})
    settings = module(load(root, table, {"archs": ["sm_100"], "defines": {"B": 2}})).settings
    assert [str(target) for item in settings.archs for target in item] == ["sm_100"]
    assert settings.defines == (("B", "2"),)


def test_hook_table_alone(root: Path) -> None:
    """Everything may stand in the hook's own table, hatchling's own keys beside it."""
    hook = {**with_sources(std="c++20"), "dependencies": ["x"], "enable-by-default": True}
    hook |= {"require-runtime-dependencies": False, "require-runtime-features": []}
    config = load(root, {}, hook)
    assert module(config).settings.std == "c++20"


@pytest.mark.parametrize("text", ["sm_80 sm_90", "sm_80,sm_90", "sm_80;sm_90", " sm_80 ,\tsm_90; ", "sm_80\nsm_90"])
def test_environment_list(root: Path, text: str) -> None:
    """A list in the environment is split at blanks, commas or semicolons."""
    settings = module(load(root, environ={"HATCH_CUDA_AOT_ARCHS": text})).settings
    assert [str(target) for item in settings.archs for target in item] == ["sm_80", "sm_90"]


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", True), ("true", True), ("YES", True), (" on ", True), ("0", False), ("False", False), ("no", False)],
)
def test_environment_boolean(root: Path, text: str, value: bool) -> None:  # noqa: FBT001
    """Booleans in the environment are spelled as people do."""
    environ = {"HATCH_CUDA_AOT_PRUNE": text, "HATCH_CUDA_AOT_LINEINFO": text}
    settings = module(load(root, environ=environ)).settings
    assert (settings.prune, settings.lineinfo) == (value, value)
    assert module(load(root, environ={"HATCH_CUDA_AOT_DEBUG": text})).settings.debug is value


def test_executor(root: Path) -> None:
    """Compilations run on this machine unless a table or the environment says otherwise."""
    assert load(root).executor == "local"
    table = with_sources(executor="dask")
    assert load(root, table).executor == "dask"
    assert load(root, table, environ={"HATCH_CUDA_AOT_EXECUTOR": "local"}).executor == "local"


def test_environment_strings(root: Path) -> None:
    """The line and the number of jobs are read as in TOML."""
    config = load(root, environ={"HATCH_CUDA_AOT_CUDA": " 13.0 ", "HATCH_CUDA_AOT_JOBS": "8"})
    assert (config.cuda, config.jobs) == ("13.0", 8)
    assert load(root, with_sources(jobs=2), environ={"HATCH_CUDA_AOT_JOBS": "auto"}).jobs is None


def test_the_process_environment_is_the_default(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an environment of its own, `load_config` reads the process's."""
    monkeypatch.setenv("HATCH_CUDA_AOT_JOBS", "5")
    assert load_config(root, with_sources(), {}, SHIPPED).jobs == 5


def test_cache_url(root: Path) -> None:
    """The shared cache stands in a table or in the environment, where an empty value means none: a fork has no secrets."""
    url = "s3://bucket/prefix"
    assert load(root).cache_url is None
    assert load(root, with_sources(cache_url=url)).cache_url == url
    assert load(root, with_sources(cache_url="")).cache_url is None
    assert load(root, environ={"HATCH_CUDA_AOT_CACHE_URL": f" {url}\n"}).cache_url == url
    table = with_sources(cache_url="https://host/path")
    assert load(root, table, environ={"HATCH_CUDA_AOT_CACHE_URL": url}).cache_url == url
    assert load(root, table, environ={"HATCH_CUDA_AOT_CACHE_URL": ""}).cache_url is None


def test_environment_replaces_no_module_value(root: Path) -> None:
    """ARCHS in the environment replaces the top-level list, not a module's own."""
    table = with_sources(modules=[{"sources": ["src/pkg/kernels/a.cu"], "archs": ["sm_90a"]}])
    config = load(root, table, environ={"HATCH_CUDA_AOT_ARCHS": "sm_80"})
    assert [str(target) for item in module(config, "a").settings.archs for target in item] == ["sm_90a"]
    assert [str(target) for item in module(config, "b").settings.archs for target in item] == ["sm_80"]


def test_variables_that_are_not_read(root: Path) -> None:
    """An unknown variable of our prefix is a warning with a suggestion; those of the cache belong to the cache."""
    environ = {
        "HATCH_CUDA_AOT_ARCH": "sm_90",
        "HATCH_CUDA_AOT_STD": "c++20",
        "HATCH_CUDA_AOT_CACHE": "0",
        "HATCH_CUDA_AOT_CACHE_DIR": "/tmp/x",
        "HATCH_OTHER": "1",
    }
    config = load(root, environ=environ)
    assert module(config).settings.std == "c++17"
    first, second = config.warnings
    assert first == ("the environment variable HATCH_CUDA_AOT_ARCH is not read. Did you mean 'HATCH_CUDA_AOT_ARCHS'?")
    assert second.startswith("the environment variable HATCH_CUDA_AOT_STD is not read. ")


def test_module_values(root: Path) -> None:
    """A module has its own value of any compile key, and the top-level one of all others."""
    own = {
        "name": "own",
        "sources": ["src/pkg/kernels/a.cu"],
        "kernels": ["f<float>", "f<int>"],
        "archs": ["sm_90a"],
        "include-dirs": ["src/pkg"],
        "std": "c++20",
        "defines": {"B": 2},
        "options": ["--restrict"],
        "prune": False,
        "lineinfo": True,
    }
    table = with_sources(
        modules=[own, {"sources": ["src/pkg/kernels/b.cu"], "std": "c++14"}],
        defines={"A": 1},
        options=["--ftz=true"],
        include_dirs=["src/pkg/device"],
    )
    config = load(root, table)
    first, second = module(config, "own"), module(config, "b")
    assert first.kernels == ("f<float>", "f<int>")
    assert [str(target) for item in first.settings.archs for target in item] == ["sm_90a"]
    assert first.settings.include_dirs == ("src/pkg",)
    assert (first.settings.std, first.settings.defines) == ("c++20", (("B", "2"),))
    assert first.settings.options.nvrtc == ("--restrict",)
    assert (first.settings.prune, first.settings.lineinfo) == (False, True)
    assert (second.settings.std, second.settings.defines) == ("c++14", (("A", "1"),))
    assert second.settings.include_dirs == ("src/pkg/device",)
    assert second.settings.options.nvrtc == ("--ftz=true",)
    assert second.settings.prune is True


def test_modules_claim_their_sources(root: Path) -> None:
    """A file that a module lists is no module of its own; the files left are, and modules are sorted by name."""
    config = load(root, with_sources(modules=[{"name": "z", "sources": ["src/pkg/kernels/a.cu"]}]))
    assert [(module.name, module.sources) for module in config.modules] == [
        ("b", ("src/pkg/kernels/b.cu",)),
        ("z", ("src/pkg/kernels/a.cu",)),
    ]


def test_module_of_several_files(root: Path) -> None:
    """A module may have several files, by globs; each file is there once."""
    modules = [{"name": "both", "sources": ["src/pkg/kernels/*.cu", "src/pkg/kernels/a.cu"]}]
    (both,) = load(root, {"modules": modules}).modules
    assert both.sources == ("src/pkg/kernels/a.cu", "src/pkg/kernels/b.cu")


def test_recursive_glob(root: Path) -> None:
    """``**`` matches any number of folders."""
    assert [module.name for module in load(root, {"sources": ["**/*.cu"]}).modules] == ["a", "b"]


@pytest.mark.parametrize(
    ("packages", "package", "folder"),
    [
        (("src/pkg",), "pkg", "src/pkg"),
        (("src/pkg/",), "pkg", "src/pkg"),
        (("flat",), "flat", "flat"),
        (("space",), "space.inner", "space/inner"),
        (("src/deep",), "deep.one.two", "src/deep/one/two"),
        (("several",), "several", "several"),
        (("bare",), "bare", "bare"),
    ],
)
def test_default_package(root: Path, packages: tuple[str, ...], package: str, folder: str) -> None:
    """The default is the only package shipped; in a namespace package the one package inside, if there is but one."""
    for file in ("flat/__init__.py", "space/inner/__init__.py", "src/deep/one/two/__init__.py", "bare/data.txt"):
        add(root, file)
    add(root, "several/one/__init__.py")
    add(root, "several/two/__init__.py")
    add(root, "space/not-a-package/x.py")
    config = load(root, packages=packages)
    assert (config.package, config.package_dir) == (package, folder)


@pytest.mark.parametrize(
    ("name", "packages", "folder"),
    [
        ("pkg", ("src/pkg", "src/other"), "src/pkg"),
        ("pkg", (), "src/pkg"),
        ("flat", (), "flat"),
        ("pkg.sub", ("src/pkg",), "src/pkg/sub"),
        ("elsewhere", ("lib/python/elsewhere",), "lib/python/elsewhere"),
    ],
)
def test_named_package(root: Path, name: str, packages: tuple[str, ...], folder: str) -> None:
    """A package is looked for where hatchling ships it from, then in the root and in src."""
    for file in ("flat/__init__.py", "src/pkg/sub/__init__.py", "lib/python/elsewhere/__init__.py"):
        add(root, file)
    config = load(root, with_sources(package=name), packages=packages)
    assert (config.package, config.package_dir) == (name, folder)


# What can be wrong with it


def test_unknown_keys(root: Path) -> None:
    """An unknown key is an error with its TOML path and a suggestion, in either table and in a module."""
    table = with_sources(option=["-G"], zzz=1, modules=[{"sources": ["src/pkg/kernels/a.cu"], "kernel": ["f<int>"]}])
    known = ", ".join(sorted(key.name for key in KEYS))
    assert problems(root, table, {"arch": ["sm_90"]}) == [
        "tool.cuda-aot.option: unknown key. Did you mean 'options'?",
        f"tool.cuda-aot.zzz: unknown key. Known are: {known}",
        f"{HOOK_TABLE}.arch: unknown key. Did you mean 'archs'?",
        "tool.cuda-aot.modules #1.kernel: unknown key. Did you mean 'kernels'?",
    ]


@pytest.mark.parametrize("name", ["overrides", "policy", "limits"])
def test_keys_of_later_issues(root: Path, name: str) -> None:
    """A key that is planned and does not work yet is an error, not a wish."""
    (problem,) = problems(root, with_sources(**{name: True}))
    assert problem.startswith(f"tool.cuda-aot.{name}: unknown key. ")


@pytest.mark.parametrize("name", ["package", "cuda", "jobs", "modules"])
def test_keys_that_modules_do_not_have(root: Path, name: str) -> None:
    """What holds for the whole build cannot be said of one module."""
    (problem,) = problems(root, {"modules": [{"sources": ["src/pkg/kernels/a.cu"], name: "x"}]})
    assert problem.startswith(f"tool.cuda-aot.modules #1.{name}: unknown key. ")


STRINGS = 'is 5: expected a list of strings, as in ["5"]'


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("package", 5, ": is 5: expected a string"),
        ("package", "", ": is '': expected a string"),
        (
            "package",
            "my-package",
            ": is 'my-package': expected the name by which the package is imported, such as \"my_package\"",
        ),
        ("archs", "sm_90", ": is 'sm_90': expected a list of strings, as in [\"sm_90\"]"),
        ("archs", [], ': is empty: expected at least one architecture, such as "sm_80"'),
        ("archs", ["sm_90", 90], " #2: is 90: expected a string"),
        ("archs", ["sm_90", "Hopper"], f" #2: 'Hopper' is not an architecture: {EXPECTED}"),
        (
            "archs",
            ["sm_80@compute_86"],
            " #1: 'sm_80@compute_86': sm_80 cannot be made from compute_86, which it does not run",
        ),
        ("cuda", 13.0, ': is the number 13.0: expected a string, as in "13.0"'),
        ("cuda", 13, ': is the number 13: expected a string, as in "13"'),
        ("include-dirs", 5, f": {STRINGS}"),
        ("include-dirs", [5], " #1: is 5: expected a string"),
        ("include-dirs", ["src/nowhere"], " #1: there is no folder 'src/nowhere' in ROOT"),
        ("include-dirs", ["src", "src/pkg/kernels/a.cu"], " #2: there is no folder 'src/pkg/kernels/a.cu' in ROOT"),
        (
            "include-dirs",
            ["../outside"],
            " #1: '../outside' lies outside the project ROOT: sdists cannot carry its headers",
        ),
        (
            "include-dirs",
            ["/usr/include"],
            " #1: '/usr/include' lies outside the project ROOT: sdists cannot carry its headers",
        ),
        ("std", 17, ': is 17: expected a language standard such as "c++17" or "c++20"'),
        ("std", "gnu++17", ': is \'gnu++17\': expected a language standard such as "c++17" or "c++20"'),
        ("defines", ["A"], ": is ['A']: expected a table, as in { UNROLL = 4, NDEBUG = true }"),
        ("defines", {"2A": 1}, ": holds '2A', which is no name of a macro"),
        ("defines", {"A=B": 1}, ": holds 'A=B', which is no name of a macro"),
        (
            "defines",
            {"A": [1]},
            ": holds A = [1]: expected a string, a number, true (defined) or false (not defined)",
        ),
        ("options", 5, f": {STRINGS}"),
        ("options", "-G", ": is '-G': expected a list of strings, as in [\"-G\"]"),
        ("options", ["-G"], ": '-G' is set by the key 'debug': use that instead"),
        (
            "options",
            ["--fast-math"],
            ": '--fast-math' is not an option that can be passed on. Did you mean '--use_fast_math'?",
        ),
        ("prune", "yes", ": is 'yes': expected true or false"),
        ("prune", 1, ": is 1: expected true or false"),
        ("lineinfo", None, ": is None: expected true or false"),
        ("debug", [], ": is []: expected true or false"),
        ("executor", "threads", ': is \'threads\': expected "local" or "dask"'),
        ("executor", True, ': is True: expected "local" or "dask"'),
        ("jobs", 0, ': is 0: expected "auto" or a number from 1'),
        ("jobs", True, ': is True: expected "auto" or a number from 1'),
        ("jobs", "many", ": is 'many': expected \"auto\" or a number from 1"),
        ("jobs", 1.5, ': is 1.5: expected "auto" or a number from 1'),
        *(
            (
                "cache-url",
                value,
                f': is {value!r}: expected a URL such as "s3://bucket/prefix", "https://host/path" or "file:///folder"',
            )
            for value in (
                "/folder",
                "C:\\folder",
                "s3:bucket",
                "://bucket",
                "s3://",
                "s3://a b",
                "simplecache::s3://bucket",
                "http://[::1",
            )
        ),
        ("cache-url", 1, ": is 1: expected a string"),
        ("cache-url", " ", ": is ' ': expected a string"),
        ("modules", {"name": "x"}, ": is {'name': 'x'}: expected tables, each headed [[tool.cuda-aot.modules]]"),
        ("modules", ["x"], ": is ['x']: expected tables, each headed [[tool.cuda-aot.modules]]"),
    ],
)
def test_bad_value(root: Path, key: str, value: Any, message: str) -> None:
    """A value of the wrong kind says where it stands, what it is, and what is expected there."""
    assert problems(root, with_sources(**{key: value})) == [f"tool.cuda-aot.{key}{message}"]


@pytest.mark.parametrize("value", [11.8, "11.8", "13.0.1", None, True])
def test_bad_line(root: Path, value: Any) -> None:
    """A line that is not supported lists those that are."""
    (problem,) = problems(root, with_sources(cuda=value))
    if isinstance(value, float):
        assert problem == 'tool.cuda-aot.cuda: is the number 11.8: expected a string, as in "11.8"'
    else:
        assert problem.startswith(f"tool.cuda-aot.cuda: is {value!r}: expected one of 'auto', '12', '13', '12.9', ")


@pytest.mark.parametrize(
    ("value", "message"),
    [("x.cu", ": is 'x.cu': expected a list of strings, as in [\"x.cu\"]"), ([""], " #1: is '': expected a string")],
)
def test_bad_sources(root: Path, value: Any, message: str) -> None:
    """Sources of the wrong kind are one error, not also missing sources."""
    assert problems(root, {"sources": value}) == [f"tool.cuda-aot.sources{message}"]


def test_every_key_checks_its_type(root: Path) -> None:
    """No key takes a value of a kind that it does not know."""
    for key in KEYS:
        (problem,) = problems(root, {**with_sources(), key.name: object()})
        assert problem.startswith(f"tool.cuda-aot.{key.name}: ")
    for key in MODULE_KEYS:
        place = "tool.cuda-aot.modules #1"
        (problem,) = problems(root, {"modules": [{"sources": ["src/pkg/kernels/a.cu"], key.name: object()}]})
        assert problem.startswith(f"{place}.{key.name}: ")


def test_places(root: Path) -> None:
    """The place of an error is where the user wrote it: either table, or the variable."""
    environ = {"HATCH_CUDA_AOT_CUDA": "11.8", "HATCH_CUDA_AOT_PRUNE": "perhaps", "HATCH_CUDA_AOT_ARCHS": "sm_90 foo"}
    found = problems(root, with_sources(std="c17"), {"jobs": -1}, environ)
    assert [problem.partition(": ")[0] for problem in found] == [
        "tool.cuda-aot.std",
        f"{HOOK_TABLE}.jobs",
        "environment variable HATCH_CUDA_AOT_ARCHS #2",
        "environment variable HATCH_CUDA_AOT_CUDA",
        "environment variable HATCH_CUDA_AOT_PRUNE",
    ]
    assert found[-1] == "environment variable HATCH_CUDA_AOT_PRUNE: is 'perhaps': expected true or false"


def test_everything_at_once(root: Path) -> None:
    """All errors are reported together, whatever else is wrong, each once."""
    table = {
        "sources": ["src/none/*.cu", "../out.cu"],
        "package": "nowhere",
        "archs": ["sm_1"],
        "options": ["-G", "-arch=sm_90"],
        "include-dirs": ["none"],
        "modules": [
            {"sources": ["src/pkg/kernels/a.cu"], "typo": 1, "options": ["-Q"], "include-dirs": ["gone"]},
            {"name": "x"},
            {"sources": ["src/pkg/kernels/*.cu"]},
            {"sources": "b.cu", "std": "old"},
        ],
    }
    found = problems(root, table)
    assert [problem.partition(": ")[0] for problem in found] == [
        "tool.cuda-aot.archs #1",
        "tool.cuda-aot.package",
        "tool.cuda-aot.options",
        "tool.cuda-aot.options",
        "tool.cuda-aot.include-dirs #1",
        "tool.cuda-aot.modules #1.typo",
        "tool.cuda-aot.modules #1.options",
        "tool.cuda-aot.modules #1.include-dirs #1",
        "tool.cuda-aot.modules #2.sources",
        "tool.cuda-aot.modules #3.name",
        "tool.cuda-aot.modules #4.sources",
        "tool.cuda-aot.modules #4.std",
        "tool.cuda-aot.sources #1",
        "tool.cuda-aot.sources #2",
    ]


def test_several_modules_name_a_shared_error_once(root: Path) -> None:
    """An error of a top-level key is not repeated for each module that has it from there."""
    modules = [{"sources": ["src/pkg/kernels/a.cu"]}, {"sources": ["src/pkg/kernels/b.cu"]}]
    assert problems(root, {"modules": modules, "options": ["-G"], "include-dirs": ["none"]}) == [
        "tool.cuda-aot.options: '-G' is set by the key 'debug': use that instead",
        "tool.cuda-aot.include-dirs #1: there is no folder 'none' in ROOT",
    ]


@pytest.mark.parametrize("place", ["table", "hook"])
@pytest.mark.parametrize("table", [{}, {"sources": []}, {"sources": [], "modules": []}])
def test_nothing_to_compile(root: Path, table: dict[str, Any], place: str) -> None:
    """No sources at all is an error with the lines to paste, wherever the empty list stands."""
    found = problems(root, table) if place == "table" else problems(root, {}, table)
    where = f"{HOOK_TABLE}.sources" if place == "hook" and table else "tool.cuda-aot.sources"
    assert found == [
        (
            f"{where}: missing: there is nothing to compile. Add for instance\n"
            '[tool.cuda-aot]\nsources = ["src/my_package/kernels/*.cu"]'
        )
    ]


def test_glob_without_a_match(root: Path) -> None:
    """A glob that matches nothing names the CUDA sources that there are."""
    assert problems(root, {"sources": ["kernels/*.cu"]}) == [
        (
            "tool.cuda-aot.sources: 'kernels/*.cu' matches no file in ROOT. "
            "Sources in the project: src/pkg/kernels/a.cu, src/pkg/kernels/b.cu"
        )
    ]
    assert problems(root, {"sources": ["src/pkg/kernels/*.cu", "src/pkg/kernels"]}) == [
        (
            "tool.cuda-aot.sources #2: 'src/pkg/kernels' matches no file in ROOT. "
            "Sources in the project: src/pkg/kernels/a.cu, src/pkg/kernels/b.cu"
        )
    ]


def test_glob_without_any_source(tmp_path: Path) -> None:
    """In a project without any CUDA source, hidden folders aside, that is said; of many, the first few are shown."""
    add(tmp_path, "src/pkg/__init__.py")
    add(tmp_path, ".venv/x.cu")
    assert problems(tmp_path, {"sources": ["*.cu"]}) == [
        "tool.cuda-aot.sources: '*.cu' matches no file in ROOT. There is no .cu file in the project"
    ]
    for number in range(7):
        add(tmp_path, f"k/{number}.cu")
    (problem,) = problems(tmp_path, {"sources": ["*.cu"]})
    assert problem.endswith("Sources in the project: k/0.cu, k/1.cu, k/2.cu, k/3.cu, k/4.cu and 2 more")


def test_module_glob_without_a_match(root: Path) -> None:
    """A module's own sources are named as such."""
    (problem,) = problems(root, with_sources(modules=[{"name": "m", "sources": ["none.cu"]}]))
    assert problem.startswith("tool.cuda-aot.modules #1.sources: 'none.cu' matches no file in ROOT. ")


@pytest.mark.parametrize("pattern", ["../outside.cu", "/etc/*.cu", "src/../../x.cu", "src/*/../../../*.cu"])
def test_source_outside_the_project(root: Path, pattern: str) -> None:
    """A source outside the project is an error that says why and what to do, whether it exists or not."""
    add(root.parent, "outside.cu")
    assert problems(root, {"sources": [pattern]}) == [
        (
            f"tool.cuda-aot.sources: {pattern!r} lies outside the project ROOT: sdists cannot carry it. "
            "Move the file into the project, or build from the folder that holds both"
        )
    ]


def test_project_whose_name_another_begins_with(tmp_path: Path) -> None:
    """A neighbour folder whose name merely begins with the project's is outside."""
    root = tmp_path / "proj"
    for file in ("proj/pkg/__init__.py", "proj2/k.cu"):
        add(tmp_path, file)
    (problem,) = problems(root, {"sources": ["../proj2/k.cu"]}, packages=("pkg",))
    assert "lies outside the project ROOT" in problem


@pytest.mark.parametrize(("first", "second"), [("k", "k"), ("k", "K"), ("Reduce", "reduce")])
def test_two_modules_of_one_name(tmp_path: Path, first: str, second: str) -> None:
    """Two files of one stem, also where only a case-sensitive disk tells them apart, are an error with a way out."""
    for file in ("src/pkg/__init__.py", f"src/one/{first}.cu", f"src/two/{second}.cu"):
        add(tmp_path, file)
    assert problems(tmp_path, {"sources": ["src/**/*.cu"]}) == [
        (
            f"tool.cuda-aot.sources: two modules would be called {second!r}: src/one/{first}.cu and src/two/{second}.cu. "
            "Rename a file, or give one of them a `name`:\n"
            f'[[tool.cuda-aot.modules]]\nname = "{second}_2"\nsources = ["src/two/{second}.cu"]'
        )
    ]


def test_a_module_of_the_name_of_a_file(root: Path) -> None:
    """A module's name must differ from those of files that stand alone."""
    (problem,) = problems(root, with_sources(modules=[{"name": "b", "sources": ["src/pkg/kernels/a.cu"]}]))
    assert problem.startswith("tool.cuda-aot.sources: two modules would be called 'b': ")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a/b", "'a/b' cannot name a module: use letters, digits, '_', '-' and '.'"),
        ("a:b", "'a:b' cannot name a module: use letters, digits, '_', '-' and '.'"),
        (".a", "'.a' cannot name a module: use letters, digits, '_', '-' and '.'"),
        ("a b", "'a b' cannot name a module: use letters, digits, '_', '-' and '.'"),
        ("manifest", "the name 'manifest' is taken by the index of modules: choose another"),
        ("Manifest", "the name 'Manifest' is taken by the index of modules: choose another"),
    ],
)
def test_names_that_modules_cannot_have(root: Path, name: str, message: str) -> None:
    """A module's name is part of file names and of ``module:kernel``."""
    assert problems(root, {"modules": [{"name": name, "sources": ["src/pkg/kernels/a.cu"]}]}) == [
        f"tool.cuda-aot.modules #1: {message}"
    ]


def test_module_without_sources(root: Path) -> None:
    """A module must list its files; one of several needs a name."""
    assert problems(root, with_sources(modules=[{"name": "m"}, {"sources": []}, {"sources": ["**/*.cu"]}])) == [
        "tool.cuda-aot.modules #1.sources: missing: list the files that make this module",
        "tool.cuda-aot.modules #2.sources: missing: list the files that make this module",
        "tool.cuda-aot.modules #3.name: missing: a module of 2 files needs a name",
    ]


def test_options_of_linked_modules(root: Path) -> None:
    """An option that a device-linked module would lose is an error there, at the place where it was written."""
    linked = {"name": "m", "sources": ["src/pkg/kernels/*.cu"]}
    lost = (
        "'--split-compile=2' has no effect where several sources are device-linked into one module: "
        "remove it for this module, or put its sources into one file"
    )
    own = {**linked, "options": ["--split-compile=2"]}
    assert problems(root, {"modules": [own]}) == [f"tool.cuda-aot.modules #1.options: {lost}"]
    shared = {"modules": [linked], "options": ["--split-compile=2"]}
    assert problems(root, shared) == [f"tool.cuda-aot.options: {lost}"]
    alone = load(root, with_sources(options=["--split-compile=2"]))
    assert module(alone).settings.options.nvrtc == ("--split-compile=2",)


@pytest.mark.parametrize(
    ("packages", "found"),
    [
        ((), "hatchling finds no package to ship"),
        (("src/pkg", "src/other"), "the wheel ships src/pkg, src/other"),
    ],
)
def test_package_not_given(root: Path, packages: tuple[str, ...], found: str) -> None:
    """Where the package cannot be told from what is shipped, it must be named."""
    assert problems(root, with_sources(), packages=packages) == [
        f"tool.cuda-aot.package: missing, and {found}: name the package that gets the kernels"
    ]


def test_package_without_a_folder(root: Path) -> None:
    """A package that does not exist is an error that lists where it was looked for."""
    assert problems(root, with_sources(package="gone.sub"), packages=("src/pkg", "lib/gone")) == [
        (
            "tool.cuda-aot.package: there is no folder for the package 'gone.sub' in ROOT "
            "(looked for lib/gone/sub, gone/sub, src/gone/sub)"
        )
    ]
    assert problems(root, with_sources(), {"package": "gone"}) == [
        f"{HOOK_TABLE}.package: there is no folder for the package 'gone' in ROOT (looked for gone, src/gone)"
    ]


# The keys themselves, and settings without a project


def test_environment_keys() -> None:
    """Only those keys are read from the environment that DESIGN.md names."""
    assert {key.name for key in KEYS if key.environment} == {
        "archs",
        "cache-url",
        "cuda",
        "executor",
        "jobs",
        "options",
        "prune",
        "lineinfo",
        "debug",
    }


def test_defaults_are_valid() -> None:
    """Every default is a value that its own key accepts."""
    for key in KEYS:
        if key.default is not None:
            key.parse(key.default)


def test_load_settings() -> None:
    """The compile keys alone can be checked, with a place of one's own in the messages."""
    settings = load_settings({"std": "c++20", "defines": {"A": 1}}, "compile_source()")
    assert (settings.std, settings.defines, settings.prune) == ("c++20", (("A", "1"),), True)
    with pytest.raises(ConfigError) as caught:
        load_settings({"std": "x", "prune": 3, "options": ["-G"], "cuda": "13"}, "compile_source()")
    assert [problem.place for problem in caught.value.problems[:3]] == [
        "compile_source().std",
        "compile_source().prune",
        "compile_source().cuda",
    ]


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)


@UNTIMED
@given(st.dictionaries(st.sampled_from([key.name for key in KEYS]), _JSON, max_size=3))
def test_arbitrary_values(table: dict[str, Any]) -> None:
    """Whatever TOML holds, the answer is a configuration or a ConfigError."""
    here = Path(__file__).parents[1]
    assume_inside = {**table, "sources": [os.path.basename(os.path.dirname(__file__)) + "/none.cu"]}
    with pytest.raises(ConfigError) as caught:
        load_config(here, assume_inside, {}, ("build",), {})
    assert all(problem.place.startswith(TABLE) for problem in caught.value.problems)


def test_headers(root: Path) -> None:
    """Listed headers are files, once each and sorted; a module's own list replaces the general one."""
    add(root, "src/pkg/device/d.inl")
    add(root, "src/pkg/gen/e.h")
    table = with_sources(
        headers=["src/pkg/**/*.inl", "src/pkg/device/*"],
        modules=[{"sources": ["src/pkg/kernels/b.cu"], "headers": ["src/pkg/gen/*.h"]}],
    )
    first, second = load(root, table).modules
    assert first.settings.headers == ("src/pkg/device/c.cuh", "src/pkg/device/d.inl")
    assert second.settings.headers == ("src/pkg/gen/e.h",)
    assert module(load(root)).settings.headers == ()


def test_wrong_headers(root: Path) -> None:
    """A pattern without a match proposes the headers that there are; one problem, however many modules inherit it."""
    table = with_sources(
        headers=["src/pkg/device/*", "src/pkg/*.h", "../x.h"], modules=[{"sources": ["src/pkg/kernels/b.cu"]}]
    )
    advice = "Move the file into the project, or build from the folder that holds both"
    assert problems(root, table) == [
        "tool.cuda-aot.headers #2: 'src/pkg/*.h' matches no file in ROOT. Headers in the project: src/pkg/device/c.cuh",
        "tool.cuda-aot.headers #3: '../x.h' lies outside the project ROOT: sdists cannot carry it. " + advice,
    ]


def test_share_front_end(root: Path) -> None:
    """A module's own value wins over the project's; anything else than the known words is refused."""
    own = {"sources": ["src/pkg/kernels/a.cu"], "share-front-end": "all"}
    config = load(root, with_sources(modules=[own], share_front_end="major"))
    assert [module(config, name).settings.share_front_end for name in "ab"] == ["all", "major"]
    assert module(load(root)).settings.share_front_end == "none"
    assert problems(root, with_sources(share_front_end=True)) == [
        "tool.cuda-aot.share-front-end: is True: expected one of 'none', 'major', 'all'"
    ]
