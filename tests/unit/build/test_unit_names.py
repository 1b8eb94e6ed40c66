"""Names of the source from the compilers' symbols; the symbols are what NVRTC 12.9 and 13.5 wrote."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hatch_cuda_aot.names import kernel_names, source_name

#: A slow machine must not fail a test of hypothesis.
UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize(
    ("symbol", "name"),
    [
        ("plain", "plain"),
        ("_Z6kernelPfi", "kernel"),
        ("_ZN2ns5scaleEPfPK1P6float4", "ns::scale"),
        ("_ZN1a1b1kEv", "a::b::k"),
        ("_Z3sumIfLin4ELb1EEvPT_", "sum<float,-4,true>"),
        ("_Z3sumIdLi4ELb0EEvPT_", "sum<double,4,false>"),
        ("_Z4litsILc97ELj3ELy5EEvPi", "lits<97,3,5>"),
        ("_Z3fnkILxn7EEvPi", "fnk<-7>"),
        ("_Z1hILm5ELs3ELh200EEvv", "h<5,3,200>"),
        ("_Z6kernelI6__halfEvPT_", "kernel<__half>"),
        ("_Z4axpyI6float4Lj128EEvT_PKS1_", "axpy<float4,128>"),
        ("_Z9block_sumIjEvPT_", "block_sum<unsigned int>"),
        ("_Z1gIJifdEEvDpT_", "g<int,float,double>"),
        ("_Z1fI3BarIfLi3EEEvv", "f<Bar<float,3>>"),
        ("_Z5enumkIL1E1EEvPi", "enumk<(E)1>"),
    ],
)
def test_functions(symbol: str, name: str) -> None:
    """A function's name has its namespaces and template arguments, integers as plain numbers, and no parameters."""
    assert source_name(symbol) == name


@pytest.mark.parametrize(
    ("symbol", "name"),
    [
        ("table", "table"),
        ("_ZL6hidden", "hidden"),
        ("_ZN4ours5innerE", "ours::inner"),
        ("_ZN4ours2tvILi4EEE", "ours::tv<4>"),
        ("_ZN1AIiE1bE", "A<int>::b"),
        ("_ZN12_GLOBAL__N_16paramsE", "params"),
        (
            "_ZN31_INTERNAL_00000000_4_a_cu_table33_GLOBAL__N__00000000_4_a_cu_table8anon_varE",
            "anon_var",
        ),
        ("_ZN31_INTERNAL_00000000_4_a_cu_table4ours5innerE", "ours::inner"),
    ],
)
def test_variables(symbol: str, name: str) -> None:
    """Anonymous namespaces and NVRTC's own bookkeeping have no part in a variable's name."""
    assert source_name(symbol) == name


@pytest.mark.parametrize(
    ("symbol", "name"),
    [
        ("_ZZ5plainE7counter", "plain::counter"),
        ("_ZZ5plainE7counter_0", "plain::counter"),
        ("_ZZN4ours1fEvE1x", "ours::f::x"),
        ("_ZZ3sumIfLin4ELb1EEvPT_E1t", "sum<float,-4,true>::t"),
        ("_ZZN2ns1kIiEEvPT_E5state", "ns::k<int>::state"),
    ],
)
def test_static_variables_of_functions(symbol: str, name: str) -> None:
    """A static variable is named by its function and itself."""
    assert source_name(symbol) == name


@pytest.mark.parametrize(
    "symbol",
    [
        "_Z1fIXadL_Z3foovEEEvv",
        "_Z1gIN1AUlvE_EEvv",
        "_Z1kIXtl1PLi1EEEEvv",
        "_ZZZ1kvENKUlvE_clEvE1s",
        "_Znot_mangled",
        "_Z",
        "_ZN",
        "_ZZ5plainE9counter",
        "$str",
    ],
)
def test_fall_back_to_the_symbol(symbol: str) -> None:
    """What the demangler cannot read keeps its symbol, which always works as a name."""
    assert source_name(symbol) == symbol


def test_kernels() -> None:
    """Plain kernels get the name of the source."""
    assert kernel_names(["noop", "_ZN2ns5scaleEPf"], {}) == {"noop": ("noop",), "_ZN2ns5scaleEPf": ("ns::scale",)}


def test_overloads_by_symbol() -> None:
    """Kernels that would share a name are each named by their symbol, and nothing else is affected."""
    symbols = ["_ZN2ns4overEPf", "_ZN2ns4overEPi", "_ZN2ns4soloEPf"]
    assert kernel_names(symbols, {}) == {
        "_ZN2ns4overEPf": ("_ZN2ns4overEPf",),
        "_ZN2ns4overEPi": ("_ZN2ns4overEPi",),
        "_ZN2ns4soloEPf": ("ns::solo",),
    }


def test_the_spelling_asked_for_wins() -> None:
    """An instantiation is called as its name expression says, without blanks that mean nothing."""
    symbols = ["_Z3sumI6__halfLi256EEvPT_", "_Z5enumkIL1E1EEvPi"]
    expressions = {"sum< half , BLOCK >": symbols[0], "enumk<B>": symbols[1]}
    assert kernel_names(symbols, expressions) == {symbols[0]: ("sum<half,BLOCK>",), symbols[1]: ("enumk<B>",)}


def test_several_spellings_of_one_instantiation() -> None:
    """An instantiation that was asked for in two ways has two names; one asked for twice in the same way has one."""
    symbol = "_Z3sumI6__halfEvT_"
    expressions = {"sum<half>": symbol, "sum< __half >": symbol, "sum<__half>": symbol}
    assert kernel_names([symbol], expressions) == {symbol: ("sum<half>", "sum<__half>")}


def test_an_expression_of_another_module_is_ignored() -> None:
    """Only the symbols given get a name."""
    assert kernel_names(["a"], {"f<int>": "_Z1fIiEvv"}) == {"a": ("a",)}


@UNTIMED
@given(st.lists(st.sampled_from(["_Z1fPf", "_Z1fPi", "_Z1gIiEvv", "f", "plain", "_ZN1n1fEv", "_ZL1g"]), unique=True))
def test_names_are_unique(symbols: list[str]) -> None:
    """Whatever the symbols, no two kernels of a module share a name."""
    names = kernel_names(symbols, {})
    assert len({name for group in names.values() for name in group}) == len(symbols)


@UNTIMED
@given(st.text("_ZNSELIiflbPKvT0123456789abc$", max_size=30).map(lambda text: f"_Z{text}"))
def test_any_symbol_has_a_name(symbol: str) -> None:
    """No symbol makes the demangler's defects ours: there is always a name, and never an exception."""
    assert source_name(symbol)
