# The kernels, compiled once for each instruction set that the compiler knows: OBJECTS. A file of isa/ says what it needs
# in its first lines, `// key: value`:
#     order      a higher one is preferred
#     machine    x86_64, aarch64 or any
#     needs      what a processor must have to run it: names of dispatch.cpp
#     flags      the compiler's
#     defines    macros: which registers it has, and VNNI (vec16.h)
#     attention  the instruction set whose attention it uses [its own]
#     rest       the instruction set whose row, packing and sampling kernels it uses [its own]
#     chosen     `by name`: not taken by default, because it has never run on a processor that has it
#     model needs, model flags    in place of `needs` and `flags` where models are built for x86_64
#
# TUREEN_MODELS builds what tests run where the processor lacks an instruction: with another encoding, or with a model of
# the instruction in plain C++.
get_filename_component(SOURCES ${CMAKE_CURRENT_LIST_DIR}/../tureen/kernels/cpu/src ABSOLUTE)
set(MODELS ${CMAKE_CURRENT_LIST_DIR}/../tests/kernels/models)
option(TUREEN_MODELS "Instruction sets that this processor lacks run on models of their instructions" OFF)
include(CheckCXXSourceCompiles)

if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set(MACHINE x86_64)
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64|arm64")
  set(MACHINE aarch64)
else()
  set(MACHINE other)
endif()

# Sets RESULT to the value of a key in a file's first lines, or to the default.
function(read_key file key default result)
  file(STRINGS ${file} lines REGEX "^// ${key}: " LIMIT_COUNT 1)
  if(lines)
    string(REGEX REPLACE "^// ${key}: *" "" value "${lines}")
  else()
    set(value "${default}")
  endif()
  set(${result} "${value}" PARENT_SCOPE)
endfunction()

# Whether the compiler and the assembler take the file with its flags.
function(check_isa name header flags defines result)
  set(CMAKE_REQUIRED_FLAGS "-std=c++17 ${flags}")
  set(CMAKE_REQUIRED_INCLUDES ${SOURCES})
  set(CMAKE_REQUIRED_QUIET ON)
  set(CMAKE_REQUIRED_DEFINITIONS)
  foreach(macro ${defines})
    list(APPEND CMAKE_REQUIRED_DEFINITIONS -D${macro})
  endforeach()
  unset(TUREEN_HAS_${name} CACHE)
  check_cxx_source_compiles("
#define VARIANT ${name}
#include \"${header}\"
namespace tureen { namespace VARIANT {
int_part check(Integers w, Inputs x) { DotSum<8> sum; sum.start(0); sum.add<0>(w, x); return sum.total(); }
} }
#ifdef TUREEN_TILE_PRODUCTS
void tiles() { _tile_zero(0); _tile_dpbsud(0, 1, 2); _tile_dpbf16ps(0, 1, 2); }
#endif
int main() {}" TUREEN_HAS_${name})
  set(${result} ${TUREEN_HAS_${name}} PARENT_SCOPE)
endfunction()

set(ISAS)
file(GLOB headers CONFIGURE_DEPENDS ${SOURCES}/isa/*.h)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${headers})
foreach(header ${headers})
  get_filename_component(name ${header} NAME_WE)
  read_key(${header} machine any machine)
  if(NOT machine MATCHES "^(any|${MACHINE})$")
    continue()
  endif()
  read_key(${header} flags "" flags)
  read_key(${header} defines "" defines)
  separate_arguments(defines)
  check_isa(${name} ${header} "${flags}" "${defines}" compiles)
  read_key(${header} order 0 order)
  list(APPEND ISAS "${order}:${name}")
  set(IS_BUILT_${name} ${compiles})
  if(NOT compiles)
    message(STATUS "instruction set ${name}: left out, this compiler does not know it")
  endif()
endforeach()
list(SORT ISAS COMPARE NATURAL ORDER DESCENDING)
list(TRANSFORM ISAS REPLACE "^[0-9]+:" "")

set(OBJECTS)
set(table)
foreach(isa ${ISAS})
  set(header ${SOURCES}/isa/${isa}.h)
  read_key(${header} needs "" needs)
  if(NOT IS_BUILT_${isa})
    string(APPEND table "LEFT_OUT(${isa}, \"${needs}\")\n")
    continue()
  endif()
  read_key(${header} flags "" flags)
  read_key(${header} defines "" defines)
  read_key(${header} attention ${isa} attention)
  read_key(${header} rest ${isa} rest)
  read_key(${header} chosen "" chosen)
  if(TUREEN_MODELS AND MACHINE STREQUAL x86_64)
    read_key(${header} "model needs" "${needs}" needs)
    read_key(${header} "model flags" "${flags}" flags)
  endif()
  set(files ${SOURCES}/linear.cpp)
  if(attention STREQUAL isa)
    list(APPEND files ${SOURCES}/attention.cpp)
  endif()
  if(rest STREQUAL isa)
    list(APPEND files ${SOURCES}/rowwise.cpp ${SOURCES}/pack_floats.cpp ${SOURCES}/sampling.cpp)
  endif()
  separate_arguments(flags)
  separate_arguments(defines)
  add_library(kernels_${isa} OBJECT ${files})
  target_compile_definitions(kernels_${isa} PRIVATE VARIANT=${isa} ISA_HEADER="isa/${isa}.h" ${defines})
  target_compile_options(kernels_${isa} PRIVATE ${flags})
  target_include_directories(kernels_${isa} PRIVATE ${SOURCES})
  if(TUREEN_MODELS)
    target_compile_definitions(kernels_${isa} PRIVATE TUREEN_MODELS)
    target_include_directories(kernels_${isa} PRIVATE ${MODELS})
  endif()
  list(APPEND OBJECTS $<TARGET_OBJECTS:kernels_${isa}>)
  set(by_default true)
  if(chosen STREQUAL "by name")
    set(by_default false)
  endif()
  string(APPEND table "ISA(${isa}, ${attention}, ${rest}, \"${needs}\", ${by_default})\n")
endforeach()
set(GENERATED ${CMAKE_CURRENT_BINARY_DIR}/generated)
file(CONFIGURE OUTPUT ${GENERATED}/isas.inc CONTENT "${table}" @ONLY)
