"""What the compiler made of the products: the instructions that they are meant for, and sums that stay in registers."""

from __future__ import annotations

import functools
import re
import shutil
from pathlib import Path
from typing import NamedTuple

import arm
import disassembly
import pytest

GUARDS = ("kernels",)

NATIVE = Path(__file__).resolve().parents[3] / "build" / "native"
FORMATS = {"Q8_ROW": 2, "Q8_0": 3, "Q6_K": 4, "Q5_K": 5, "Q5_1": 6, "Q5_0": 7, "Q4_K": 8, "Q4_1": 9, "Q4_0": 10,
           "MXFP4": 11, "IQ4_NL": 12, "IQ4_XS": 13, "Q3_K": 14, "Q2_K": 15}  # fmt: skip
"""Those with 8-bit products, by their numbers in matrix.h."""


class Products(NamedTuple):
    panel: str  # the instruction that multiplies a panel
    row: str  # and a single row
    register: str  # what its sums are in
    most_spills: int = 0  # between the first and the last product
    is_arm: bool = False


ISAS = {
    "amx": Products("vpdpbusd", "vpdpbusd", "%zmm"),
    "avx512vnni": Products("vpdpbusd", "vpdpbusd", "%zmm"),
    "avx512": Products("vpmaddubsw", "vpmaddubsw", "%zmm"),
    "avxvnni": Products("{vex} vpdpbusd", "{vex} vpdpbusd", "%ymm", 2),
    "avx2": Products("vpmaddubsw", "vpmaddubsw", "%ymm", 2),
    "i8mm": Products("usmmla", "usdot", "v", is_arm=True),
    "neon": Products("sdot", "sdot", "v", is_arm=True),
}
MOST_SPILLS = {("avx2", "Q2_K"): 3}  # two scales and two offsets for each group
BOTH = pytest.mark.parametrize("kernel", ["multiply_panel", "multiply_packed"])
EACH = pytest.mark.parametrize("isa", ISAS)


@functools.cache
def _folder(isa):
    """The folder of the object files. Skips the test where there are none."""
    if isa in ISAS and ISAS[isa].is_arm:
        return arm.build() / "CMakeFiles" / f"kernels_{isa}.dir"
    folder = NATIVE / "CMakeFiles" / f"kernels_{isa}.dir"
    compilers = list(NATIVE.glob("CMakeFiles/*/CMakeCXXCompiler.cmake"))
    if shutil.which("objdump") is None:
        pytest.skip("no objdump: apt-get install binutils")
    if not folder.is_dir() or not any('COMPILER_ID "GNU"' in one.read_text() for one in compilers):
        pytest.skip(f"{folder} has no object files of GCC: make native")
    return folder


@functools.cache
def _functions(isa, source):
    (file,) = _folder(isa).rglob(f"{source}.cpp.o")
    return disassembly.functions(file, arm.OBJDUMP if isa in ISAS and ISAS[isa].is_arm else "objdump")


def _kernel(isa, kernel, matrix_format):
    """The panel's kernel, or that of a single row."""
    rows = r"\d+" if kernel == "multiply_panel" else "1"
    name = re.compile(rf"::{kernel}<\(tureen::Format\){FORMATS[matrix_format]}, {rows}>\(")
    (function,) = (one for one in _functions(isa, "linear") if name.search(one.name))
    return function


def _loop(isa, kernel, matrix_format):
    """The function, its innermost loop with products, and where they are in it."""
    function, mnemonic = _kernel(isa, kernel, matrix_format), ISAS[isa].panel
    if kernel == "multiply_packed":
        mnemonic = ISAS[isa].row
    (loop,) = function.loops(mnemonic)
    return function, loop, disassembly.places(loop, mnemonic)


@pytest.mark.parametrize("matrix_format", FORMATS)
@BOTH
@EACH
def test_the_innermost_loop_multiplies_with_the_instruction_it_is_meant_for(isa, kernel, matrix_format):
    _, loop, products = _loop(isa, kernel, matrix_format)
    assert len(products) >= 8  # of a group's 8 quads, all
    assert all(ISAS[isa].register in loop[at].text for at in products)


def _summing():
    """Where sums must stay: of a single row, they and the integers of 6 bits are more than 16 registers hold."""
    for isa, products in ISAS.items():
        yield isa, "multiply_panel"
        if products.register != "%ymm":
            yield isa, "multiply_packed"


@pytest.mark.parametrize("matrix_format", FORMATS)
@pytest.mark.parametrize(("isa", "kernel"), _summing())
def test_no_sum_leaves_its_register_between_the_products(isa, kernel, matrix_format):
    function, loop, products = _loop(isa, kernel, matrix_format)
    spills = function.spills(loop[products[0] : products[-1]])
    assert len(spills) <= MOST_SPILLS.get((isa, matrix_format), ISAS[isa].most_spills), spills


@pytest.mark.parametrize("matrix_format", FORMATS)
@BOTH
@pytest.mark.parametrize("isa", ["amx", "avx512vnni", "avx512"])
def test_with_32_wide_registers_the_whole_loop_keeps_all_in_them(isa, kernel, matrix_format):
    function, loop, _ = _loop(isa, kernel, matrix_format)
    assert function.spills(loop) == []


@pytest.mark.parametrize("matrix_format", FORMATS)
def test_amx_multiplies_rows_of_integers_by_tiles(matrix_format):
    name = re.compile(rf"multiply_many<\(tureen::Format\){FORMATS[matrix_format]}, .*TileKernel")
    (function,) = (one for one in _functions("amx", "linear") if name.search(one.name))
    loops = function.loops("tdpbsud")
    assert loops
    for loop in loops:
        assert len(disassembly.places(loop, "tileloadd")) >= 2
        assert len(disassembly.places(loop, "tilestored")) == len(disassembly.places(loop, "tdpbsud"))


WORDS = {"avx512vnni": "vpdpwssd", "avx512": "vpmaddwd", "avxvnni": "{vex} vpdpwssd", "avx2": "vpmaddwd"}
"""What multiplies integers of 16 bits."""


@pytest.mark.parametrize("isa", WORDS)
def test_sums_of_words_stay_in_their_registers(isa):
    """Of the block with the most rows and tiles."""
    kernels = [one for one in _functions(isa, "linear") if re.search(r"WordPanel<\d>::.*add_span<\d>", one.name)]
    assert kernels
    function = max(kernels, key=lambda one: re.findall(r"<(\d)>", one.name))
    (loop,) = function.loops(WORDS[isa])
    assert len(disassembly.places(loop, WORDS[isa])) >= 8
    assert function.spills(loop) == []


def test_amx_multiplies_bfloat16_by_tiles():
    loops = [loop for function in _functions("amx", "linear") for loop in function.loops("tdpbf16ps")]
    assert loops
    assert all(len(disassembly.places(loop, "tileloadd")) == 2 for loop in loops)


@pytest.mark.parametrize(("isa", "mnemonic"), [("avx512vnni", "vpdpwssd"), ("avx512", "vpmaddwd"),
                                               ("avxvnni", "{vex} vpdpwssd"), ("avx2", "vpmaddwd")])  # fmt: skip
def test_attention_multiplies_integers_with_the_instruction_it_is_meant_for(isa, mnemonic):
    for kernel in ("int_scores", "int_values"):
        functions = [one for one in _functions(isa, "attention") if f"::{kernel}<" in one.name]
        assert functions
        for function in functions:
            assert disassembly.places(function.code, mnemonic), function.name


AVX512 = r"%zmm|%[xy]mm(1[6-9]|[23]\d)|%k[0-7]"
WIDER = {
    "avx512vnni": r"^v\w+bf16|%tmm",
    "avx512": r"^vpdp|^v\w+bf16|%tmm",
    "avxvnni": AVX512,
    "avx2": rf"{AVX512}|vpdp",
    "portable": r"%[yz]mm|%k[0-7]",
}


@pytest.mark.parametrize("isa", WIDER)
def test_no_instruction_needs_a_better_processor_than_the_set_asks_for(isa):
    sources = [path.name.removesuffix(".cpp.o") for path in _folder(isa).rglob("*.cpp.o")]
    assert "linear" in sources
    for source in sources:
        for function in _functions(isa, source):
            assert [one.text for one in function.code if re.search(WIDER[isa], one.text)] == [], function.name
