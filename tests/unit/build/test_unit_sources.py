"""The closure of project headers: a header that is missed is a compile error, one too many a needless rebuild."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hatch_cuda_aot.errors import SourceError
from hatch_cuda_aot.sources import HEADERS, SOURCES, SourceTree, expand, is_outside, read_tree, relative

#: A slow machine must not fail a test of hypothesis.
UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def write(root: Path, **files: str) -> None:
    """Write files; in a name ``__`` stands for a slash and ``_dot_`` for a dot."""
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())


def closure(root: Path, *include_dirs: str, source: str = "src/k.cu") -> list[str]:
    """Return the paths in the tree of a source."""
    return [path for path, _ in read_tree(root, [source], include_dirs).files]


INCLUDES = [
    '#include "a.h"',
    "#include <a.h>",
    '#include"a.h"',
    '  #\tinclude   "a.h"',
    '# include "a.h" // why',
    '#include_next "a.h"',
    '#if __has_include("a.h")',
    "#if defined(X) && __has_include( <a.h> )",
    '#include \\\n"a.h"',
    '#inc\\\nlude "a.h"',
    '#include "a\\\n.h"',
    '#include \\\r\n"a.h"',
    '#include "./a.h"',
    '#include "../src/a.h"',
    '#include "sub/../a.h"',
    "int before;\n#include <a.h>\nint after;",
    '#if 0\n#include "a.h"\n#endif',
    "\ufeffint x;\n#include <a.h>\r\n",
]


@pytest.mark.parametrize("text", INCLUDES)
def test_ways_to_include(tmp_path: Path, text: str) -> None:
    """Every way of writing an #include beside the source is followed, taken or not."""
    write(tmp_path, src__k_dot_cu=text, src__a_dot_h="", src__b_dot_h="", src__sub__c_dot_h="")
    assert closure(tmp_path) == ["src/a.h", "src/k.cu"]


@pytest.mark.parametrize(
    "text",
    ["", "// nothing", "#include A_HEADER", 'const char *x = "a.h";', '#define A "a.h"', 'include "a.h"', "#include"],
)
def test_what_is_no_include(tmp_path: Path, text: str) -> None:
    """A name in other places is not followed; an #include through a macro cannot be, and is a compile error later."""
    write(tmp_path, src__k_dot_cu=text, src__a_dot_h="")
    assert closure(tmp_path) == ["src/k.cu"]


def test_listed_headers(tmp_path: Path) -> None:
    """Headers that are listed are in the tree with what they include, though nothing includes them by name."""
    write(tmp_path, src__k_dot_cu="#include NAME", inc__listed_dot_h='#include "more.h"', inc__more_dot_h="")
    write(tmp_path, inc__other_dot_h="")
    tree = read_tree(tmp_path, ["src/k.cu"], [], ["inc/listed.h"])
    assert [path for path, _ in tree.files] == ["inc/listed.h", "inc/more.h", "src/k.cu"]
    assert tree.digest != read_tree(tmp_path, ["src/k.cu"], []).digest


CLOSED = [
    "",
    '#include "a.h"',
    "#include <a.h> // and #include NAME",
    "/* #include NAME */",
    "// include nothing",
    '#define NAME "a.h"\n#include NAME',
    "# define NAME <b/a.h> // why\n#include NAME /* why */",
    '#ifdef X\n#define NAME "a.h"\n#else\n#define NAME "b.h"\n#endif\n#include NAME',
    "#ifdef __has_include\n#if __has_include(<a.h>)\n#endif\n#endif",
    "#include <include/a.h>",
    "#include <a//b.h>\n//include",
    'const char *x = "#include NAME";',
    "#define include_me(x) x\nint embedded;",
    "#ifdef NAME\n#include NAME\n#endif",
]


@pytest.mark.parametrize("text", CLOSED)
def test_trees_that_are_closed(text: str) -> None:
    """Where every name is written out, or is a macro for relative paths, only files of the tree can be read."""
    assert SourceTree.of_texts({"src/k.cu": text}).is_closed({})


DEFINED = '#define NAME "/home/a.h"\n'

OPEN = [
    '#define NAME "/home/a.h"\n#include NAME',
    '#define NAME "C:\\\\a.h"\n#include NAME',
    '#ifdef X\n#define NAME "a.h"\n#else\n#define NAME "b/../../a.h"\n#endif\n#include NAME',
    '#define OTHER "a.h"\n#define NAME OTHER\n#include NAME',
    '#define NAME(x) "a.h"\n#include NAME(x)',
    "#define STRING(x) #x\n#include STRING(/home/a.h)",
    '#define NAME "a.h"\n#include_next NAME OTHER',
    DEFINED + "#inc\\\nlude NAME",
    DEFINED + "#include \\\nNAME",
    DEFINED + "%:include NAME",
    DEFINED + "??=include NAME",
    DEFINED + "/* why */ #include NAME",
    '/* why */ #include "/home/a.h"',
    '#include /* why */ "/home/a.h"',
    DEFINED + "#if __has_include(NAME)\n#endif",
    DEFINED + "#if defined(X) && __has_include (NAME)\n#endif",
    '#include "/home/a.h"',
    '#include "../../a.h"',
    '#embed "a.bin"',
    DEFINED + 'const char *x = R"(" /* )";\n#include NAME\n/* */',
    DEFINED + "int x = 1'000; //'\n#include NAME",
]


@pytest.mark.parametrize("text", OPEN)
def test_trees_that_are_open(text: str) -> None:
    """Where a file could be read from anywhere, the digest of the tree does not speak for it."""
    assert not SourceTree.of_texts({"src/k.cu": text}).is_closed({})


def test_macros_of_the_command_line(tmp_path: Path) -> None:
    """A macro may have its value from the options, or from any file of the tree; each value must lead inside."""
    write(tmp_path, src__k_dot_cu='#include "a.h"\n#include NAME', src__a_dot_h='#define NAME "b.h"')
    tree = read_tree(tmp_path, ["src/k.cu"], [])
    assert tree.is_closed({})
    assert tree.is_closed({"NAME": "<c.h>", "OTHER": "/x"})
    assert not tree.is_closed({"NAME": '"/c.h"'})


def test_includes_that_leave_the_project(tmp_path: Path) -> None:
    """A name that leads out of the project to nothing may lead to something tomorrow."""
    write(tmp_path, project__src__k_dot_cu='#if __has_include("../../local.h")\n#endif')
    assert not read_tree(tmp_path / "project", ["src/k.cu"], []).is_closed({})
    write(tmp_path, project__src__k_dot_cu='#if __has_include("../local.h")\n#endif')
    assert read_tree(tmp_path / "project", ["src/k.cu"], []).is_closed({})


def test_where_headers_are_looked_for(tmp_path: Path) -> None:
    """Beside the including file, beside the source, and in the include folders: as the compiler looks."""
    write(
        tmp_path,
        src__k_dot_cu='#include "deep/one.h"\n#include <lib.h>\n#include <group/member.h>',
        src__deep__one_dot_h='#include "two.h"\n#include "beside_source.h"',
        src__deep__two_dot_h="",
        src__beside_source_dot_h="",
        include__lib_dot_h='#include "lib_detail.h"',
        include__lib_detail_dot_h="",
        more__group__member_dot_h="",
        elsewhere__lib_dot_h="",
    )
    assert closure(tmp_path, "include", "more") == [
        "include/lib.h",
        "include/lib_detail.h",
        "more/group/member.h",
        "src/beside_source.h",
        "src/deep/one.h",
        "src/deep/two.h",
        "src/k.cu",
    ]


def test_headers_of_one_name(tmp_path: Path) -> None:
    """Of several headers of one name all are in the tree, so that the compiler decides as it would in the project."""
    write(tmp_path, src__k_dot_cu="#include <a.h>", src__a_dot_h="", include__a_dot_h='#include "b.h"')
    write(tmp_path, include__b_dot_h="")
    assert closure(tmp_path, "include") == ["include/a.h", "include/b.h", "src/a.h", "src/k.cu"]


def test_several_sources(tmp_path: Path) -> None:
    """The sources of one module share a tree, and each finds the headers beside the others."""
    write(tmp_path, one__a_dot_cu="#include <two.h>", two__b_dot_cu='#include "../one/one.h"')
    write(tmp_path, one__one_dot_h="", two__two_dot_h="")
    tree = read_tree(tmp_path, ["one/a.cu", "two/b.cu"], [])
    assert [path for path, _ in tree.files] == ["one/a.cu", "one/one.h", "two/b.cu", "two/two.h"]


def test_cycles(tmp_path: Path) -> None:
    """Headers that include each other, or themselves, are read once."""
    write(tmp_path, src__k_dot_cu='#include "a.h"', src__a_dot_h='#include "b.h"\n#include "a.h"')
    write(tmp_path, src__b_dot_h='#include "a.h"\n#include "k.cu"')
    assert closure(tmp_path) == ["src/a.h", "src/b.h", "src/k.cu"]


def test_unresolved_names(tmp_path: Path) -> None:
    """What is no file of the project is left to the toolkit, by the name as written; a folder is no header."""
    write(tmp_path, src__k_dot_cu="#include <cuda_fp16.h>\n#include <curand_kernel.h>\n#include <folder>\n", x__y="")
    write(tmp_path, src__folder__a_dot_h="")
    tree = read_tree(tmp_path, ["src/k.cu"], ["x"])
    assert tree.unresolved == {"cuda_fp16.h", "curand_kernel.h", "folder"}


def test_bytes_are_kept(tmp_path: Path) -> None:
    """Files reach the compiler byte for byte, whatever their encoding; as text they are still readable."""
    content = b'// caf\xe9\r\n#include "a.h"\n\x00'
    (tmp_path / "k.cu").write_bytes(content)
    (tmp_path / "a.h").write_bytes(b"")
    tree = read_tree(tmp_path, ["k.cu"], [])
    assert dict(tree.files) == {"k.cu": content, "a.h": b""}
    assert "#include" in tree.text("k.cu")
    assert tree.texts() == ["", tree.text("k.cu")]


@pytest.mark.parametrize("absolute", [False, True])
def test_header_outside_the_project(tmp_path: Path, *, absolute: bool) -> None:
    """A header outside the project is an error that names who includes it and where it lies."""
    root = tmp_path / "project"
    outside = tmp_path / "common" / "x.h"
    name = str(outside) if absolute else "../../common/x.h"
    write(tmp_path, project__src__k_dot_cu='#include "a.h"', project__src__a_dot_h=f'#include "{name}"')
    assert read_tree(root, ["src/k.cu"], []).unresolved == {name}
    write(tmp_path, common__x_dot_h="")
    with pytest.raises(SourceError) as caught:
        read_tree(root, ["src/k.cu"], [])
    assert str(caught.value) == (
        f"src/a.h includes {name!r}, which lies outside the project {root} (at {outside}): sdists cannot carry it. "
        "Move the file into the project, or build from the folder that holds both"
    )


def test_header_that_only_seems_outside(tmp_path: Path) -> None:
    """What the compiler finds inside is no error because a folder searched later has the same name outside."""
    root = tmp_path / "project"
    write(tmp_path, project__k_dot_cu='#include "inc/a.h"', project__inc__a_dot_h='#include "../x.h"')
    write(tmp_path, project__x_dot_h="", x_dot_h="")
    assert closure(root, source="k.cu") == ["inc/a.h", "k.cu", "x.h"]


def test_source_that_cannot_be_read(tmp_path: Path) -> None:
    """A file that vanished says so."""
    with pytest.raises(SourceError, match=r"^cannot read k\.cu: No such file"):
        read_tree(tmp_path, ["k.cu"], [])


def test_digest_has_no_order() -> None:
    """The digest is of the set of files, in whichever order they were found or written down."""
    texts = {"b.cu": "two", "a.h": "one", "c.h": ""}
    assert SourceTree.of_texts(texts).digest == SourceTree.of_texts(dict(reversed(texts.items()))).digest


def test_digest_of_reading_order(tmp_path: Path) -> None:
    """The order of sources, of include folders and of #include lines leaves no trace in the tree."""
    write(tmp_path, a_dot_cu="#include <x.h>\n#include <y.h>", b_dot_cu="#include <y.h>", i__x_dot_h="", j__y_dot_h="")
    one = read_tree(tmp_path, ["a.cu", "b.cu"], ["i", "j"])
    two = read_tree(tmp_path, ["b.cu", "a.cu"], ["j", "i"])
    assert (one.files, one.digest) == (two.files, two.digest)


def test_digest_is_relative(tmp_path: Path) -> None:
    """Two copies of a project in different folders have one digest."""
    for copy in ("one", "two/deeper"):
        folder = tmp_path / copy
        write(folder, src__k_dot_cu='#include "a.h"', src__a_dot_h="same")
    trees = [read_tree(tmp_path / copy, ["src/k.cu"], []) for copy in ("one", "two/deeper")]
    assert trees[0].digest == trees[1].digest


_FILES = st.dictionaries(st.text("ab/.:0123", min_size=1, max_size=5), st.text("ab:0123", max_size=6), max_size=3)


@UNTIMED
@given(_FILES, _FILES)
def test_digest_tells_trees_apart(one: dict[str, str], two: dict[str, str]) -> None:
    """Two trees share a digest only if they are the same, however paths and contents could run together."""
    same = SourceTree.of_texts(one).digest == SourceTree.of_texts(two).digest
    assert same == (one == two)


def test_needs_of_texts() -> None:
    """In files given as text, names that are none of them are the toolkit's."""
    tree = SourceTree.of_texts(
        {"k.cu": '#include "a.h"\n#include <curand_kernel.h>', "inc/a.h": "#include <cub/cub.cuh>"}
    )
    assert tree.unresolved == {"curand_kernel.h", "cub/cub.cuh"}


def test_expand(tmp_path: Path) -> None:
    """Globs give sorted relative files, each once, with forward slashes; folders do not count."""
    write(tmp_path, b_dot_cu="", a_dot_cu="", deep__er__c_dot_cu="", folder_dot_cu__x="")
    assert expand(tmp_path, ["*.cu", "./a.cu", "**/c.cu", "deep/../b.cu"], "here") == (
        ["a.cu", "b.cu", "deep/er/c.cu"],
        [],
    )


def test_proposals(tmp_path: Path) -> None:
    """Where a pattern matches nothing, the message lists the files that could be meant."""
    (_, [source]), (_, [header]) = (expand(tmp_path, ["none.x"], "here", usual) for usual in (SOURCES, HEADERS))
    assert source.message.endswith("There is no .cu file in the project")
    assert header.message.endswith("There is no header in the project")
    write(tmp_path, a_dot_cu="", inc__b_dot_cuh="", inc__c_dot_h="", _dot_git__d_dot_h="")
    (_, [source]), (_, [header]) = (expand(tmp_path, ["none.x"], "here", usual) for usual in (SOURCES, HEADERS))
    assert source.message.endswith("Sources in the project: a.cu")
    assert header.message.endswith("Headers in the project: inc/b.cuh, inc/c.h")


def test_expand_problems(tmp_path: Path) -> None:
    """Each pattern without a match is a problem, numbered from 1 where there are several; the rest still counts."""
    write(tmp_path, a_dot_cu="")
    found, problems = expand(tmp_path, ["none.cu", "a.cu", "../x.cu"], "place")
    assert found == ["a.cu"]
    assert [problem.place for problem in problems] == ["place #1", "place #3"]
    assert expand(tmp_path, ["none.cu"], "place")[1][0].place == "place"


@pytest.mark.parametrize(
    ("root", "path", "outside"),
    [
        ("/project", "src/a.cu", False),
        ("/project", ".", False),
        ("/project", "src/../a.cu", False),
        ("/project", "/project/a.cu", False),
        ("/project", "../a.cu", True),
        ("/project", "../project2/a.cu", True),
        ("/project", "/etc/a.cu", True),
        ("/project", "src/../../a.cu", True),
        ("/", "src/a.cu", False),
    ],
)
def test_is_outside(root: str, path: str, outside: bool) -> None:  # noqa: FBT001
    """A path is outside if it leaves the project once ``..`` is worked out; a project may be the root of a disk."""
    assert is_outside(Path(root), path) is outside


def test_relative(tmp_path: Path) -> None:
    """Each file of the project has one path, however it was given."""
    assert {relative(tmp_path, path) for path in ("a/b.h", "./a/b.h", "a/c/../b.h", str(tmp_path / "a/b.h"))} == {
        "a/b.h"
    }
