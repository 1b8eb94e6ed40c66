"""Kernel templates are found in sources, and nothing else is taken for one."""

from __future__ import annotations

import pytest

from hatch_cuda_aot.templates import kernel_templates


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("template <typename T> __global__ void axpy(T a, const T* x) {}", "axpy"),
        ("template <typename T, int N = (3 > 2), class U = B<C<int>>>\n__global__ void f(T);", "f"),
        ("template <class T> static void __launch_bounds__(2 * (N)) __global__ f(T* p = g(1)) { h(); }", "f"),
        ("template <class T> __global__ void __launch_bounds__(256, 2) __cluster_dims__(1) f(T) {}", "f"),
        ("template <class T> requires (sizeof(T) > 2) __attribute__((used)) __global__ void f(T) {}", "f"),
        ("template <template <class> class P> __global__ void f(P<int>*);", "f"),
        ("template <class T> __global__ void f(T); template <class T> __global__ void g(T) {}", "f g"),
        ("namespace a { namespace { template <class T> __global__ void f(T); } } template <class T> __global__ void g(T);",
         "a::f g"),
        ("namespace a::b [[deprecated]] { void h() { if (x) {} } template <class T> __global__ void f(T); }", "a::b::f"),
        ("inline namespace v1 { namespace a { template <class T> __global__ void f(T); } }", "a::f v1::a::f"),
        ("namespace x = y; using namespace z; template <class T> __global__ void f(T);", "f"),
        ('extern "C++" { template <class T> __global__ void f(T); }', "f"),
        ("// template <class T> __global__ void f(T);", ""),
        ("/* template <class T> __global__ void f(T); */", ""),
        ("#define F template <class T> \\\n __global__ void f(T);", ""),
        ('const char* s = "template <class T> __global__ void f(T);";', ""),
        ('auto s = R"x(template <class T> __global__ void f(T);)x";', ""),
        ("template <> __global__ void f<float>(float);", ""),
        ("template __global__ void f<float>(float);", ""),
        ("template <class T> __device__ T f(T); template <class T> struct S { __device__ void g(); };", ""),
        ('extern "C" __global__ void f(int); __global__ void g(float);', ""),
        ("template <class T", ""),
        ("}}} template <class T> __global__ void f(T);", "f"),
    ],
)  # fmt: skip
def test_kernel_templates(source: str, names: str) -> None:
    """Each spelling of a kernel template gives its qualified name; anything else gives none."""
    assert " ".join(kernel_templates([source])) == names


def test_several_files() -> None:
    """The names of all files come sorted and once."""
    header = "template <class T> __global__ void g(T);"
    assert kernel_templates([header, "template <class T> __global__ void f(T);", header]) == ("f", "g")
